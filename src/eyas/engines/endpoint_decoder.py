"""A running server as a decoder: requests timed, its counters read from the answers or over HTTP."""

import time
from collections.abc import Sequence
from typing import Any

import httpx

from eyas.engines.base import Prompt, Sampling
from eyas.engines.decoder_base import Served
from eyas.engines.endpoint import EndpointEngine
from eyas.engines.netrc_auth import from_netrc
from eyas.engines.spec_decode_metrics import SpecCounters, from_prometheus, from_reply
from eyas.errors import EyasError, UserError
from eyas.types import Completion, Failure, TargetSpec

_COUNTS = {"return_spec_tokens_details": True}
_PROBE_TOKENS = 8


class EndpointDecoder:
    """``url`` ends in ``/v1``. A server that counts each answer's rounds in its reply (SGLang) is read there;
    of another one ``/metrics`` is read, which lies next to ``/v1``.

    Raises: UserError when the server cannot be reached, or with ``has_draft`` counts no speculative decoding.
    """

    def __init__(
        self,
        url: str,
        spec: TargetSpec,
        tokenizer: Any,
        *,
        end_of_turn_id: int,
        timeout_s: float,
        has_draft: bool = True,
    ) -> None:
        try:
            self.engine = _Timed(url, spec, tokenizer, end_of_turn_id=end_of_turn_id, timeout_s=timeout_s)
        except UserError as error:
            raise UserError(
                error.what.replace("regenerate.endpoint", "evaluate.endpoint"), error.hint
            ) from None
        self.metrics_url = self.engine.url.removesuffix("/v1") + "/metrics"
        self.has_draft = has_draft
        self._in_replies = has_draft and self._counts_in_replies()
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
        if not self.has_draft:
            return SpecCounters()
        if self._in_replies:
            return self.engine.counted
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

    def _counts_in_replies(self) -> bool:
        """Have a few tokens answered and look whether the reply counts its rounds."""
        body = {
            "model": self.engine.model,
            "prompt": [min(self.engine.spec.eos_token_ids)],
            "max_tokens": _PROBE_TOKENS,
            "temperature": 0.0,
            "ignore_eos": True,
        }
        url = f"{self.engine.url}/completions"
        try:
            reply = httpx.post(url, json=body | _COUNTS, timeout=self.engine.timeout_s, auth=from_netrc())
            return reply.is_success and from_reply(reply.json()) is not None
        except (httpx.HTTPError, ValueError, AttributeError, TypeError):
            return False


class _Timed(EndpointEngine):
    """Notes how long each answer took, retries included, and what the answers say of their rounds."""

    asks = _COUNTS

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.latencies_s: list[float] = []
        self.counted = SpecCounters(0, 0, ())

    async def _answer(self, client: Any, prompt: Prompt, sampling: Sampling) -> Completion | Failure:
        started = time.perf_counter()
        answer = await super()._answer(client, prompt, sampling)
        self.latencies_s.append(time.perf_counter() - started)
        return answer

    def _completion(self, prompt: Prompt, reply: httpx.Response) -> Completion | Failure:
        answer = super()._completion(prompt, reply)
        if isinstance(answer, Completion) and (found := from_reply(reply.json())) is not None:
            self.counted += found
        return answer
