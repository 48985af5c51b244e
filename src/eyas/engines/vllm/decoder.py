"""vLLM as it serves: with a draft or without, requests in flight as asked for, counters read as they are."""

import itertools
import multiprocessing
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eyas.config.schema import VllmSettings
from eyas.engines.base import Prompt, Sampling
from eyas.engines.decoder_base import Served
from eyas.engines.spec_decode_metrics import SpecCounters, from_vllm
from eyas.engines.vllm.engine import seed_of, to_completion
from eyas.engines.vllm.engine_args import Plan, engine_arguments
from eyas.engines.vllm.session import first_line, shut_down, start_llm, vllm_environment, watch
from eyas.engines.vllm.versions import RAW_LOGITS, check_draft_support, check_parallel, installed_version
from eyas.errors import EyasError, UserError
from eyas.types import Failure, TargetSpec

_BATCH_TOKENS = 8192


class VllmDecoder:
    """``draft`` is an exported folder, None for the target alone; ``max_length`` covers prompt and answer.

    ``kind`` is the ``vllm.py`` of the draft's kind.
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
        self.spec, self.has_draft, self.in_process = spec, draft is not None, in_process
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
            speculative = None if draft is None else kind.speculative_config(str(draft), num_draft_tokens)
            self.llm = _start(plan, speculative)
        self.engine: Any = self.llm.llm_engine
        processes = set(multiprocessing.active_children()) - before
        if processes:
            watch(self.engine.engine_core, processes, self._closing)

    def answer(self, prompts: Sequence[Prompt], concurrency: int, sampling: Sampling) -> Served:
        self._check_sampling(sampling)
        served = Served()
        waiting = iter(prompts)
        open_prompts: dict[str, tuple[Prompt, float]] = {}
        begun: set[str] = set()
        started = time.perf_counter()
        while len(served.answers) < len(prompts):
            for prompt in itertools.islice(waiting, concurrency - len(open_prompts)):
                request_id = f"served-{next(self._numbers):08d}"
                open_prompts[request_id] = prompt, time.perf_counter()
                self.engine.add_request(
                    request_id, {"prompt_token_ids": list(prompt.token_ids)}, self._params(prompt, sampling)
                )
            outputs = self._step()
            now = time.perf_counter()
            for output in outputs:
                prompt, sent = open_prompts[output.request_id]
                if output.request_id not in begun and output.outputs[0].token_ids:
                    begun.add(output.request_id)
                    served.first_token_s.append(now - sent)
                if output.finished:
                    del open_prompts[output.request_id]
                    answer = to_completion(prompt.prompt_id, output.outputs[0])
                    if isinstance(answer, Failure):
                        raise EyasError(f"vLLM gave no answer to {answer.sample_id}: {answer.reason}")
                    served.answers[prompt.prompt_id] = answer
                    served.latencies_s.append(now - sent)
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

        return SamplingParams(
            max_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            seed=seed_of(sampling, prompt),
            stop_token_ids=list(self.spec.eos_token_ids),
            detokenize=False,
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
