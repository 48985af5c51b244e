"""A running server as a decoder: requests timed, its counters read over HTTP."""

import time
from collections.abc import Sequence
from typing import Any

import httpx

from eyas.engines.base import Prompt, Sampling
from eyas.engines.decoder_base import Served
from eyas.engines.endpoint import EndpointEngine
from eyas.engines.netrc_auth import from_netrc
from eyas.engines.spec_decode_metrics import SpecCounters, from_prometheus
from eyas.errors import EyasError, UserError
from eyas.types import Completion, Failure, TargetSpec


class EndpointDecoder:
    """``url`` ends in ``/v1``; ``/metrics`` lies beside it, as vLLM and SGLang have it.

    Raises: UserError when the server cannot be reached or counts no speculative decoding.
    """

    def __init__(
        self, url: str, spec: TargetSpec, tokenizer: Any, *, end_of_turn_id: int, timeout_s: float
    ) -> None:
        try:
            self.engine = _Timed(url, spec, tokenizer, end_of_turn_id=end_of_turn_id, timeout_s=timeout_s)
        except UserError as error:
            raise UserError(
                error.what.replace("regenerate.endpoint", "evaluate.endpoint"), error.hint
            ) from None
        self.metrics_url = self.engine.url.removesuffix("/v1") + "/metrics"
        self.counters()

    def answer(self, prompts: Sequence[Prompt], concurrency: int, sampling: Sampling) -> Served:
        self.engine.concurrency, self.engine.latencies_s = concurrency, []
        served = Served()
        started = time.perf_counter()
        for item in self.engine.generate(prompts, sampling):
            if isinstance(item, Failure):
                raise EyasError(f"the server gave no answer to {item.sample_id}: {item.reason}")
            served.answers[item.prompt_id] = item
        served.seconds = time.perf_counter() - started
        served.latencies_s = self.engine.latencies_s
        return served

    def counters(self) -> SpecCounters:
        try:
            reply = httpx.get(self.metrics_url, timeout=30, follow_redirects=True, auth=from_netrc())
            reply.raise_for_status()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise UserError(
                f"{self.metrics_url} does not answer: {type(error).__name__} {error}",
                hint="vLLM shows its counters there; SGLang does when started with --enable-metrics",
            ) from None
        return from_prometheus(reply.text)

    def close(self) -> None:
        self.engine.close()


class _Timed(EndpointEngine):
    """Notes how long each answer took, retries included."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.latencies_s: list[float] = []

    async def _answer(self, client: Any, prompt: Prompt, sampling: Sampling) -> Completion | Failure:
        started = time.perf_counter()
        answer = await super()._answer(client, prompt, sampling)
        self.latencies_s.append(time.perf_counter() - started)
        return answer
