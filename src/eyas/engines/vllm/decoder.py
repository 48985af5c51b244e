"""vLLM as it serves: with a draft or without, requests in flight as asked for, counters read as they are."""

import dataclasses
import itertools
import multiprocessing
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eyas.config.schema import VllmSettings
from eyas.engines.base import Prompt, Sampling
from eyas.engines.decoder_base import Served
from eyas.engines.request_load import ClosedLoop, OpenLoop
from eyas.engines.spec_decode_metrics import SpecCounters, from_vllm
from eyas.engines.vllm.engine import seed_of, to_completion
from eyas.engines.vllm.engine_args import Plan, engine_arguments
from eyas.engines.vllm.session import first_line, shut_down, start_llm, vllm_environment, watch
from eyas.engines.vllm.versions import RAW_LOGITS, check_draft_support, check_parallel, installed_version
from eyas.errors import EyasError, UserError
from eyas.types import Failure, TargetSpec

_BATCH_TOKENS = 8192
_ON = {True: "on", False: "off", None: "unknown"}


class VllmDecoder:
    """``draft`` is an exported folder, None where none is needed; ``max_length`` covers prompt and answer.

    ``num_draft_tokens`` 0 is the target alone. ``kind`` is the ``vllm.py`` of the draft's kind or a baseline.
    """

    def __init__(
        self,
        folder: Path,
        spec: TargetSpec,
        *,
        draft: Path | None,
        num_draft_tokens: int,
        kind: Any,
        settings: VllmSettings,
        max_length: int,
        max_concurrency: int,
        trust_remote_code: bool = False,
        in_process: bool = False,
    ) -> None:
        check_parallel(spec, settings.tensor_parallel_size)
        check_draft_support(spec, kind)
        self.spec, self.has_draft, self.in_process = spec, num_draft_tokens > 0, in_process
        self._numbers = itertools.count()
        plan = Plan(
            folder=folder,
            spec=spec,
            settings=settings,
            max_model_len=max_length,
            batch_tokens=_BATCH_TOKENS,
            batch_size=max_concurrency,
            trust_remote_code=trust_remote_code,
            way=None,
            in_process=in_process,
        )
        self._closing = threading.Event()
        before = set(multiprocessing.active_children())
        with vllm_environment(plan):
            words = draft and str(draft), num_draft_tokens
            self.llm = _start(plan, kind.speculative_config(*words) if self.has_draft else None)
        self.engine: Any = self.llm.llm_engine
        processes = set(multiprocessing.active_children()) - before
        if processes:
            watch(self.engine.engine_core, processes, self._closing)

    @property
    def runner(self) -> str | None:
        """Which of vLLM's model runners computes here; None from a version that does not say."""
        second = getattr(self.engine.vllm_config, "use_v2_model_runner", None)
        return None if second is None else "V2" if second else "V1"

    @property
    def deployment(self) -> dict[str, str]:
        config = self.engine.vllm_config
        chunks = getattr(config.scheduler_config, "enable_chunked_prefill", None)
        cache = str(config.cache_config.cache_dtype)
        return {
            "prefix caching": _ON[config.cache_config.enable_prefix_caching],
            "chunked prefill": _ON[chunks],
            "key/value cache": self.spec.dtype if cache == "auto" else cache,
            "weights": str(config.model_config.quantization or self.spec.dtype),
        }

    def answer(self, prompts: Sequence[Prompt], concurrency: int, sampling: Sampling) -> Served:
        return self._serve(ClosedLoop(prompts, concurrency), sampling)

    def answer_at(self, prompts: Sequence[Prompt], arrivals_s: Sequence[float], sampling: Sampling) -> Served:
        return self._serve(OpenLoop(prompts, arrivals_s), sampling)

    def _serve(self, load: ClosedLoop | OpenLoop, sampling: Sampling) -> Served:
        self._check_sampling(sampling)
        served = Served()
        sent: dict[str, tuple[Prompt, float]] = {}
        heard: dict[str, float] = {}  # when each open request's last output came
        tokens: dict[str, list[int]] = defaultdict(list)
        started = time.perf_counter()
        while len(served.answers) < load.num_prompts:
            for prompt, arrival in load.due(time.perf_counter() - started, len(sent)):
                request_id = f"served-{next(self._numbers):08d}"
                sent[request_id] = prompt, arrival
                self.engine.add_request(
                    request_id, {"prompt_token_ids": list(prompt.token_ids)}, self._params(prompt, sampling)
                )
            if not sent:
                time.sleep(load.wait(time.perf_counter() - started))
                continue
            outputs = self._step()
            now = time.perf_counter() - started
            for output in outputs:
                request_id = output.request_id
                prompt, arrival = sent[request_id]
                (new,) = output.outputs
                tokens[request_id] += new.token_ids
                if new.token_ids:
                    if request_id in heard:
                        served.inter_token_s.append(now - heard[request_id])
                    else:
                        served.first_token_s.append(now - arrival)
                    heard[request_id] = now
                if output.finished:
                    del sent[request_id]
                    heard.pop(request_id, None)
                    whole = dataclasses.replace(new, token_ids=tokens.pop(request_id))
                    answer = to_completion(prompt.prompt_id, whole)
                    if isinstance(answer, Failure):
                        raise EyasError(f"vLLM gave no answer to {answer.sample_id}: {answer.reason}")
                    served.answers[prompt.prompt_id] = answer
                    served.latencies_s.append(now - arrival)
        served.seconds = time.perf_counter() - started
        return served

    def next_token_logits(self, token_ids: Sequence[int]) -> dict[int, float]:
        """Return the logits of the likeliest tokens behind ``token_ids``: before 0.26 log-probabilities."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=20, detokenize=False)
        request_id = f"logits-{next(self._numbers):08d}"
        self.engine.add_request(request_id, {"prompt_token_ids": list(token_ids)}, params)
        while True:
            for output in self._step():
                if output.finished:
                    return {token: found.logprob for token, found in output.outputs[0].logprobs[0].items()}

    def counters(self) -> SpecCounters:
        return from_vllm(self.llm.get_metrics())

    def close(self) -> None:
        self._closing.set()
        shut_down(self.engine.engine_core)
        self.engine = self.llm = None
        if self.in_process:
            from vllm.distributed import cleanup_dist_env_and_memory

            cleanup_dist_env_and_memory()

    def _params(self, prompt: Prompt, sampling: Sampling) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            max_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            seed=seed_of(sampling, prompt),
            stop_token_ids=list(self.spec.eos_token_ids),
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,  # or every step copies every answer so far
        )

    def _check_sampling(self, sampling: Sampling) -> None:
        from vllm.platforms import current_platform

        if self.has_draft and sampling.temperature > 0 and current_platform.is_cpu():
            raise UserError(
                "vLLM's CPU build samples wrongly with a draft at temperatures above 0",
                hint="set evaluate.temperatures=[0], or evaluate on a GPU",
            )

    def _step(self) -> list[Any]:
        try:
            return list(self.engine.step())
        except Exception as error:
            raise EyasError(f"vLLM stopped: {first_line(error)}", hint="its own log is above") from error


def _start(plan: Plan, speculative_config: dict[str, Any] | None) -> Any:
    from vllm.platforms import current_platform

    own: dict[str, Any] = {"skip_tokenizer_init": True, "use_tqdm_on_load": False}
    own["disable_log_stats"] = False  # or there are no counters
    if installed_version() >= RAW_LOGITS:
        own["logprobs_mode"] = "raw_logits"
    if speculative_config is not None:
        own["speculative_config"] = speculative_config
    # Prefix caching stays off: prompts are answered several times over, and it would flatter the later ones.
    return start_llm(engine_arguments(plan, Path(), current_platform.is_cpu(), **own))
