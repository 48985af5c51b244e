"""How SGLang is told to serve an EAGLE-3 draft, and which ones it would compute otherwise."""

import json
from pathlib import Path

from eyas.drafters.common.sglang_layers import eagle3_ids, eagle3_layers_trouble, oldest_for_eagle3
from eyas.drafters.common.window import window_of
from eyas.drafters.eagle3.config import DraftConfig
from eyas.layer_ids import ReadLayers

oldest = oldest_for_eagle3


def arguments(draft: str, num_draft_tokens: int) -> list[str]:
    return [
        *("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", draft),
        # A chain: one token a step, and the token that verification starts from.
        *("--speculative-num-steps", str(num_draft_tokens), "--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", str(num_draft_tokens + 1)),
        *_window_words(Path(draft) / "config.json"),
    ]


def _window_words(path: Path) -> tuple[str, ...]:
    """Return what gives the draft its window: SGLang's class of Llama drafts reads none from config.json.

    Source: ``llama_eagle3.py`` of 0.5.12 to 0.5.23. SGLang's windows do not count the query itself, as its
    ``get_dflash_attention_sliding_window_size`` shows.
    """
    if not path.is_file():
        return ()  # not on this machine: a command that is only printed
    config = json.loads(path.read_text(encoding="utf-8"))
    window = window_of(config.get("transformer_layer_config") or config)
    return () if window is None else ("--speculative-draft-window-size", str(window - 1))


def trouble(config: DraftConfig, layers: ReadLayers | None) -> str | None:
    if config.norm_before_residual:
        return "SGLang adds to the hidden state, this draft to the normed one (norm_before_residual)"
    if config.norm_before_fc:
        return "SGLang has no norm of all aux layers as one (norm_before_fc)"
    if config.has_own_embedding:
        return "SGLang takes the target's embedding, this draft has its own"
    if config.latent_attention is not None and config.num_layers > 1:
        return "SGLang takes one layer of latent attention"
    if config.sliding_window == 1:
        return "SGLang has no window of one token"
    if config.num_aux_layers == 1:
        return "SGLang leaves out fc and its norm where a draft reads one aux layer"
    return eagle3_layers_trouble(layers) if layers else None


def check_layers(layers: ReadLayers) -> None:
    eagle3_ids(layers)
