"""vLLM as an engine of eyas."""

import contextlib
import queue
import threading
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eyas.config.schema import VllmSettings
from eyas.engines.base import ProbeOutput, Prompt, Sampling
from eyas.engines.vllm.engine_args import Plan
from eyas.engines.vllm.memory import check_memory
from eyas.engines.vllm.server_session import ServerSession
from eyas.engines.vllm.session import Session
from eyas.engines.vllm.state_transfer import WITNESS_PREFIX, Finished, take_digests, take_states
from eyas.engines.vllm.versions import check_parallel, choose_way, installed_version
from eyas.errors import ContractError
from eyas.tensor_pool import tensor_pool
from eyas.types import Completion, Failure, HiddenStates, TargetSpec, TokenizedSample

Capturing = Session | ServerSession

_FILE_TIMEOUT_S = 120.0
_NUM_READERS = 4
# So long states are waited for before the engine is asked again.
_PATIENCE_S = 0.01


@dataclass(frozen=True)
class _Read:
    """A request that is done, or why its states are not there."""

    sample: TokenizedSample
    item: ProbeOutput | HiddenStates | Failure


class VllmEngine:
    """Captures through vLLM's own facility or through hooks in its workers; answers prompts.

    vLLM is started when it is first needed, once for capturing and once for generating; on GPUs in processes
    that import the program anew, so a script of one's own needs ``if __name__ == "__main__":``.
    With ``endpoint`` a server captures instead, and nothing is started or needs to be installed here.
    ``max_length`` is the longest sample it will be given; by default all that the target allows.
    With ``answers`` one start does both, by hooks. ``in_process`` is for tests of one rank.
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
        endpoint: str | None = None,
        answers: bool = False,
        in_process: bool = False,
    ) -> None:
        settings = settings or VllmSettings()
        self.folder, self.spec, self.settings = folder, spec, settings
        self.batch_tokens, self.batch_size = batch_tokens, batch_size
        longest = spec.max_position_embeddings
        self.max_length = min(max_length or longest, longest)
        self.trust_remote_code, self.in_process = trust_remote_code, in_process
        self.endpoint, self.answers = endpoint, answers
        if endpoint is None:
            num_ranks = settings.tensor_parallel_size
            check_parallel(spec, num_ranks)
            asked = "worker" if answers else settings.capture
            self.way = choose_way(asked, installed_version(), spec, num_ranks)
        self._session: Session | None = None
        self._server: ServerSession | None = None
        self._num_requests = 0

    def capture(self, samples: Iterable[TokenizedSample]) -> Iterator[HiddenStates | Failure]:
        """Keep a bounded number of samples in flight; states come as they are done and verified."""
        for item in self._capture(samples, probe_output=False):
            assert not isinstance(item, ProbeOutput)
            yield item

    def probe_outputs(self, samples: Iterable[TokenizedSample]) -> list[ProbeOutput | Failure]:
        """Capture with the engine's own next token and checksums of every rank."""
        items = list(self._capture(samples, probe_output=True))
        return [item for item in items if not isinstance(item, HiddenStates)]

    def generate(self, prompts: Iterable[Prompt], sampling: Sampling) -> Iterator[Completion | Failure]:
        """Answer prompts; each has its own seed, so an answer does not depend on its neighbours."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        waiting = list(prompts)
        if not waiting:
            return
        session = self._generating(max(len(p.token_ids) for p in waiting) + sampling.max_new_tokens)
        open_prompts: dict[str, str] = {}
        for prompt in waiting:
            params = SamplingParams(
                max_tokens=sampling.max_new_tokens,
                temperature=sampling.temperature,
                seed=seed_of(sampling, prompt) if sampling.temperature else None,
                stop_token_ids=list(self.spec.eos_token_ids),
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,  # or every step copies every answer so far
            )
            request_id = self._new_name("answer-")
            open_prompts[request_id] = prompt.prompt_id
            session.engine.add_request(request_id, {"prompt_token_ids": list(prompt.token_ids)}, params)
        while open_prompts:
            for output in session.step():
                if output.finished:
                    yield to_completion(open_prompts.pop(output.request_id), output.outputs[0])

    def close(self) -> None:
        for session in (self._session, self._server):
            if session is not None:
                session.close()
        self._session = self._server = None

    # ------------------------------------------------------------- sessions
    def _capturing(self) -> Capturing:
        if self.endpoint is not None:
            if self._server is None:
                self._server = ServerSession(
                    self.endpoint,
                    self.spec,
                    folder=self.settings.staging_dir,
                    max_length=self.max_length,
                    in_flight=2 * self.batch_size,  # as many again as it computes together wait there
                )
            return self._server
        if self._session is not None and self._session.plan.way is None:
            self.close()
        if self._session is None:
            self._session = self._start(self.max_length + 1, capture=True)
        return self._session

    def _generating(self, num_tokens: int) -> Session:
        running = self._session
        if running is not None:
            captures_only = running.plan.way is not None and not self.answers
            if captures_only or running.plan.max_model_len < num_tokens:
                self.close()
        if self._session is None:
            # A power of two, so that later and longer turns of a dialogue rarely need a new start.
            length = min(1 << (num_tokens - 1).bit_length(), self.spec.max_position_embeddings)
            least = self.max_length + 1 if self.answers else 0
            self._session = self._start(max(length, num_tokens, least), capture=self.answers)
        return self._session

    def _start(self, max_model_len: int, capture: bool) -> Session:
        plan = Plan(
            self.folder,
            self.spec,
            self.settings,
            max_model_len,
            self.batch_tokens,
            self.batch_size,
            self.trust_remote_code,
            self.way if capture else None,
            self.in_process,
        )
        check_memory(plan)
        return Session(plan)

    def _new_name(self, prefix: str) -> str:
        self._num_requests += 1
        return f"{prefix}{self._num_requests:08d}"

    # ------------------------------------------------------------- capture
    def _capture(
        self, samples: Iterable[TokenizedSample], probe_output: bool
    ) -> Iterator[ProbeOutput | HiddenStates | Failure]:
        session = self._capturing()
        window_tokens = max(1, self.settings.staging_bytes // self.spec.bytes_per_token)
        waiting = iter(samples)
        ahead = next(waiting, None)
        open_requests: dict[str, TokenizedSample] = {}
        num_reading = tokens_in_flight = 0
        done: queue.SimpleQueue[Future[_Read]] = queue.SimpleQueue()
        stop = threading.Event()
        with tensor_pool(_NUM_READERS, "eyas-read") as pool:
            try:
                while ahead is not None or open_requests or num_reading:
                    while ahead is not None and (
                        not tokens_in_flight or tokens_in_flight + len(ahead) <= window_tokens
                    ):
                        open_requests[self._submit(session, ahead, probe_output)] = ahead
                        tokens_in_flight += len(ahead)
                        ahead = next(waiting, None)
                    patience_s = 0.0
                    # States that are there are not kept waiting for the engine's next step.
                    if open_requests and (not num_reading or session.has_output()):
                        for finished in session.finished():
                            sample = open_requests.pop(finished.name)
                            future = pool.submit(self._read, session, sample, finished, probe_output, stop)
                            future.add_done_callback(done.put)
                            num_reading += 1
                    elif num_reading:
                        session.nudge()
                        patience_s = _PATIENCE_S
                    for future in _taken(done, patience_s):
                        read = future.result()
                        num_reading -= 1
                        tokens_in_flight -= len(read.sample)
                        yield read.item
            finally:
                # Interrupted: the engine may be dead, and files that readers wait for may never come.
                stop.set()
                if open_requests and session in (self._session, self._server):
                    session.abort(list(open_requests))

    def _submit(self, session: Capturing, sample: TokenizedSample, probe_output: bool) -> str:
        if len(sample) > self.max_length:
            raise ContractError(
                f"sample {sample.sample_id} has {len(sample)} tokens, the engine takes {self.max_length}"
            )
        name = self._new_name(WITNESS_PREFIX if probe_output else "sample-")
        session.submit(name, sample.input_ids.tolist(), probe_output)
        return name

    def _read(
        self,
        session: Capturing,
        sample: TokenizedSample,
        done: Finished,
        probe_output: bool,
        stop: threading.Event,
    ) -> _Read:
        """Fetch and verify what the workers wrote for one request; runs in a thread."""
        try:
            return _Read(sample, self._verified(session, sample, done, probe_output, stop))
        except (ContractError, OSError) as error:
            return _Read(sample, Failure(sample.sample_id, str(error)))

    def _verified(
        self,
        session: Capturing,
        sample: TokenizedSample,
        done: Finished,
        probe_output: bool,
        stop: threading.Event,
    ) -> ProbeOutput | HiddenStates:
        if done.reason != "length":
            raise ContractError(f"vLLM ended the request with {done.reason!r}")
        if done.path is None:
            raise ContractError("vLLM names no file of states for this request")
        staged = take_states(done.path, _FILE_TIMEOUT_S, stop)
        layer_ids = session.layer_ids
        if staged.layer_ids != layer_ids:
            raise ContractError(f"the worker captured layers {staged.layer_ids}, asked for {layer_ids}")
        if staged.token_ids.tolist() != sample.input_ids.tolist():
            raise ContractError("the worker captured other token ids than it was sent")
        spec = self.spec
        shape = (len(sample), len(layer_ids) - 1, spec.hidden_size)
        lower, last, figures = staged.lower, staged.last, staged.figures
        if tuple(lower.shape) != shape or str(lower.dtype) != f"torch.{spec.dtype}":
            raise ContractError(
                f"the worker wrote {tuple(lower.shape)} {lower.dtype}, expected {shape} {spec.dtype}"
            )
        # The last layer is captured beside the aux layers, unless it is one of them.
        if len(layer_ids) > spec.num_aux_layers:
            aux, of_aux = lower, figures[:, :-1]
        else:
            aux, of_aux = torch.cat([lower, last[:, None]], dim=1), figures
        states = HiddenStates.select(sample, aux, last, (of_aux, figures[:, -1]))
        if not probe_output:
            return states
        ranks = range(session.num_ranks)
        digests = tuple(take_digests(done.path, r, _FILE_TIMEOUT_S, stop) for r in ranks)
        if done.token is None or done.logprob is None:
            raise ContractError("vLLM gave no token and log-probability of its own")
        return ProbeOutput(states, done.token, done.logprob, digests)


def _taken(done: "queue.SimpleQueue[Future[_Read]]", timeout_s: float) -> list[Future[_Read]]:
    """Return all that lie there, after waiting for the first at most so long."""
    taken = []
    with contextlib.suppress(queue.Empty):
        taken.append(done.get(timeout=timeout_s) if timeout_s else done.get_nowait())
        while True:
            taken.append(done.get_nowait())
    return taken


def seed_of(sampling: Sampling, prompt: Prompt) -> int:
    """Return a prompt's own seed, of the 32 bits that torch's generators on a CPU read."""
    return zlib.crc32(f"{sampling.seed}:{prompt.prompt_id}".encode())


def to_completion(prompt_id: str, answer: Any) -> Completion | Failure:
    if answer.finish_reason not in ("stop", "length"):
        return Failure(prompt_id, f"vLLM ended the answer with {answer.finish_reason!r}")
    return Completion(prompt_id, tuple(answer.token_ids), answer.finish_reason)
