"""SGLang as it serves: its own server, asked over HTTP; each reply counts its rounds."""

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from eyas.engines.base import Prompt, Sampling
from eyas.engines.decoder_base import Served
from eyas.engines.endpoint_decoder import EndpointDecoder
from eyas.engines.sglang.server import SglangServer
from eyas.engines.spec_decode_metrics import SpecCounters
from eyas.errors import EyasError
from eyas.types import TargetSpec

_HOST = "127.0.0.1"
_ANSWER_S = 1800.0
_LIKELIEST = 20


class SglangDecoder:
    """``draft`` is an exported folder, None for the target alone; ``max_length`` covers prompt and answer.

    ``kind`` is the ``sglang.py`` of the draft's kind.
    """

    def __init__(
        self,
        folder: Path,
        spec: TargetSpec,
        *,
        draft: Path | None,
        num_draft_tokens: int,
        kind: Any,
        max_length: int,
        max_concurrency: int,
        trust_remote_code: bool = False,
    ) -> None:
        port = _free_port()
        words = [
            *("python", "-m", "sglang.launch_server", "--model-path", str(folder), "--dtype", spec.dtype),
            *(kind.arguments(str(draft.resolve()), num_draft_tokens) if draft is not None else ()),
            *(("--trust-remote-code",) if trust_remote_code else ()),
            *("--context-length", str(max_length), "--max-running-requests", str(max_concurrency)),
            # Prompts are answered several times over, and a cache would flatter the later ones.
            *("--disable-radix-cache", "--host", _HOST, "--port", str(port)),
        ]
        self._server = SglangServer(words, f"http://{_HOST}:{port}")
        try:
            # Its replies hold token ids, so no tokenizer is asked.
            self._decoder = EndpointDecoder(
                f"{self._server.address}/v1",
                spec,
                None,
                end_of_turn_id=min(spec.eos_token_ids),
                timeout_s=_ANSWER_S,
                has_draft=draft is not None,
            )
        except BaseException:
            self._server.close()
            raise

    def answer(self, prompts: Sequence[Prompt], concurrency: int, sampling: Sampling) -> Served:
        return self._decoder.answer(prompts, concurrency, sampling)

    def next_token_logits(self, token_ids: Sequence[int]) -> dict[int, float]:
        """Return the log-probabilities of the likeliest tokens behind ``token_ids``."""
        body = {
            "input_ids": list(token_ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True,
            "top_logprobs_num": _LIKELIEST,
        }
        try:
            reply = httpx.post(f"{self._server.address}/generate", json=body, timeout=_ANSWER_S)
            reply.raise_for_status()
            first = reply.json()["meta_info"]["output_top_logprobs"][0]
            return {int(token): float(logprob) for logprob, token, *_ in first}
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise EyasError(f"SGLang gave no log-probabilities: {error}") from None

    def counters(self) -> SpecCounters:
        return self._decoder.counters()

    def close(self) -> None:
        self._decoder.close()
        self._server.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])
