"""vLLM as an engine of eyas."""

import contextlib
import threading
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eyas.config.schema import VllmSettings
from eyas.engines.base import Prompt, Sampling, Witness
from eyas.engines.vllm.session import Plan, Session
from eyas.engines.vllm.staging import take_digests, take_states
from eyas.engines.vllm.versions import check_parallel, choose_way, installed_version
from eyas.errors import ContractError
from eyas.threads import tensor_pool
from eyas.types import Completion, Failure, HiddenStates, TargetSpec, TokenizedSample

_WITNESS_PREFIX = "witness-"  # as in connector.py, which only vLLM's processes can import
_FILE_TIMEOUT_S = 120.0
_NUM_READERS = 4


@dataclass(frozen=True)
class _Read:
    """A request that is done, or why its states are not there."""

    sample: TokenizedSample
    item: Witness | HiddenStates | Failure


class VllmEngine:
    """Captures through vLLM's own facility or through hooks in its workers; answers prompts.

    vLLM is started when it is first needed, once for capturing and once for generating.
    ``max_length`` is the longest sample it will be given; by default all that the target allows.
    ``in_process`` is for tests of one rank.
    """

    streams = True

    def __init__(
        self,
        folder: Path,
        spec: TargetSpec,
        *,
        settings: VllmSettings | None = None,
        max_length: int | None = None,
        batch_tokens: int = 4096,
        batch_size: int = 64,
        device: str = "cpu",
        trust_remote_code: bool = False,
        in_process: bool = False,
    ) -> None:
        settings = settings or VllmSettings()
        self.folder, self.spec, self.settings = folder, spec, settings
        self.batch_tokens, self.batch_size = batch_tokens, batch_size
        longest = spec.max_position_embeddings
        self.max_length = min(max_length or longest, longest)
        self.trust_remote_code, self.in_process = trust_remote_code, in_process
        num_ranks = settings.tensor_parallel_size
        check_parallel(spec, num_ranks)
        self.way = choose_way(settings.capture, installed_version(), spec, num_ranks)
        self._session: Session | None = None
        self._num_requests = 0

    def describe(self) -> TargetSpec:
        return self.spec

    def capture(self, samples: Iterable[TokenizedSample]) -> Iterator[HiddenStates | Failure]:
        """Keep a bounded number of samples in flight; states come as they are done and verified."""
        for item in self._capture(samples, witness=False):
            assert not isinstance(item, Witness)
            yield item

    def witness(self, samples: Iterable[TokenizedSample]) -> list[Witness | Failure]:
        """Capture with the engine's own next token and checksums of every rank."""
        items = list(self._capture(samples, witness=True))
        return [item for item in items if not isinstance(item, HiddenStates)]

    def generate(self, prompts: Iterable[Prompt], sampling: Sampling) -> Iterator[Completion | Failure]:
        """Answer prompts; each has its own seed, so an answer does not depend on its neighbours."""
        from vllm import SamplingParams

        waiting = list(prompts)
        if not waiting:
            return
        session = self._generating(max(len(p.token_ids) for p in waiting) + sampling.max_new_tokens)
        open_prompts: dict[str, str] = {}
        for prompt in waiting:
            params = SamplingParams(
                max_tokens=sampling.max_new_tokens,
                temperature=sampling.temperature,
                # torch's generators on a CPU read 32 bits of their seed, so both have to be in them.
                seed=zlib.crc32(f"{sampling.seed}:{prompt.prompt_id}".encode()),
                stop_token_ids=list(self.spec.eos_token_ids),
                detokenize=False,
            )
            request_id = self._new_id("answer-")
            open_prompts[request_id] = prompt.prompt_id
            session.engine.add_request(request_id, {"prompt_token_ids": list(prompt.token_ids)}, params)
        while open_prompts:
            for output in session.step():
                if output.finished:
                    yield _completion(open_prompts.pop(output.request_id), output.outputs[0])

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    # ------------------------------------------------------------- sessions
    def _capturing(self) -> Session:
        if self._session is not None and self._session.plan.way is None:
            self.close()
        if self._session is None:
            self._session = self._start(self.max_length + 1, capture=True)
        return self._session

    def _generating(self, num_tokens: int) -> Session:
        running = self._session
        if running is not None and (running.plan.way or running.plan.max_model_len < num_tokens):
            self.close()
        if self._session is None:
            # A power of two, so that later and longer turns of a dialogue rarely need a new start.
            length = min(1 << (num_tokens - 1).bit_length(), self.spec.max_position_embeddings)
            self._session = self._start(max(length, num_tokens), capture=False)
        return self._session

    def _start(self, max_model_len: int, capture: bool) -> Session:
        return Session(
            Plan(
                self.folder,
                self.spec,
                self.settings,
                max_model_len,
                self.batch_tokens,
                self.batch_size,
                self.trust_remote_code,
                self.in_process,
                self.way if capture else None,
            )
        )

    def _new_id(self, prefix: str) -> str:
        self._num_requests += 1
        return f"{prefix}{self._num_requests:08d}"

    # ------------------------------------------------------------- capture
    def _capture(
        self, samples: Iterable[TokenizedSample], witness: bool
    ) -> Iterator[Witness | HiddenStates | Failure]:
        session = self._capturing()
        window_tokens = max(1, self.settings.staging_bytes // session.plan.bytes_per_token)
        waiting = deque(samples)
        open_requests: dict[str, TokenizedSample] = {}
        reading: set[Future[_Read]] = set()
        tokens_in_flight = 0
        stop = threading.Event()
        with tensor_pool(_NUM_READERS, "eyas-read") as pool:
            try:
                while waiting or open_requests or reading:
                    while waiting and (
                        not tokens_in_flight or tokens_in_flight + len(waiting[0]) <= window_tokens
                    ):
                        sample = waiting.popleft()
                        open_requests[self._submit(session, sample, witness)] = sample
                        tokens_in_flight += len(sample)
                    if open_requests:
                        for output in session.step():
                            if output.finished:
                                sample = open_requests.pop(output.request_id)
                                reading.add(pool.submit(self._read, session, sample, output, witness, stop))
                    elif reading:
                        if self.in_process:  # files are written on a later step of the engine
                            session.step()
                        wait(reading, timeout=0.002, return_when=FIRST_COMPLETED)
                    for future in [f for f in reading if f.done()]:
                        reading.remove(future)
                        read = future.result()
                        tokens_in_flight -= len(read.sample)
                        yield read.item
            finally:
                # Interrupted: the engine may be dead, and files that readers wait for may never come.
                stop.set()
                if open_requests and self._session is session:
                    with contextlib.suppress(Exception):
                        session.engine.abort_request(list(open_requests))

    def _submit(self, session: Session, sample: TokenizedSample, witness: bool) -> str:
        from vllm import SamplingParams

        if len(sample) > self.max_length:
            raise ContractError(
                f"sample {sample.sample_id} has {len(sample)} tokens, the engine takes {self.max_length}"
            )
        request_id = self._new_id(_WITNESS_PREFIX if witness else "sample-")
        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            logprobs=1 if witness else None,
            ignore_eos=True,
            detokenize=False,
            extra_args={"eyas_file": request_id, "eyas_witness": witness},
        )
        session.engine.add_request(request_id, {"prompt_token_ids": sample.input_ids.tolist()}, params)
        return request_id

    def _read(
        self, session: Session, sample: TokenizedSample, output: Any, witness: bool, stop: threading.Event
    ) -> _Read:
        """Fetch and verify what the workers wrote for one request; runs in a thread."""
        try:
            return _Read(sample, self._verified(session, sample, output, witness, stop))
        except (ContractError, OSError) as error:
            return _Read(sample, Failure(sample.sample_id, str(error)))

    def _verified(
        self, session: Session, sample: TokenizedSample, output: Any, witness: bool, stop: threading.Event
    ) -> Witness | HiddenStates:
        answer = output.outputs[0]
        if answer.finish_reason != "length":
            raise ContractError(f"vLLM ended the request with {answer.finish_reason!r}")
        path = self._path(session, output)
        staged = take_states(path, _FILE_TIMEOUT_S, stop)
        layer_ids = session.plan.layer_ids
        if staged.layer_ids != layer_ids:
            raise ContractError(f"the worker captured layers {staged.layer_ids}, asked for {layer_ids}")
        if staged.token_ids.tolist() != sample.input_ids.tolist():
            raise ContractError("the worker captured other token ids than it was sent")
        spec = self.spec
        shape = (len(sample), len(layer_ids) - 1, spec.hidden_size)
        lower, last = staged.lower, staged.last
        if tuple(lower.shape) != shape or str(lower.dtype) != f"torch.{spec.dtype}":
            raise ContractError(
                f"the worker wrote {tuple(lower.shape)} {lower.dtype}, expected {shape} {spec.dtype}"
            )
        # The last layer is captured beside the aux layers, unless it is one of them.
        aux = lower if len(layer_ids) > spec.num_aux_layers else torch.cat([lower, last[:, None]], dim=1)
        states = HiddenStates.select(sample, aux, last)
        if not witness:
            return states
        digests = tuple(take_digests(path, r, _FILE_TIMEOUT_S, stop) for r in range(session.num_ranks))
        token = answer.token_ids[0]
        return Witness(states, token, answer.logprobs[0][token].logprob, digests)

    def _path(self, session: Session, output: Any) -> Path:
        if self.way == "worker":
            return session.staging / str(output.request_id)
        if not output.kv_transfer_params:
            raise ContractError("vLLM names no file of states for this request")
        return Path(output.kv_transfer_params["hidden_states_path"])


def _completion(prompt_id: str, answer: Any) -> Completion | Failure:
    if answer.finish_reason not in ("stop", "length"):
        return Failure(prompt_id, f"vLLM ended the answer with {answer.finish_reason!r}")
    return Completion(prompt_id, tuple(answer.token_ids), answer.finish_reason)
