"""What a draft takes over of its target's shape, and that serving computes the same positions."""

import importlib.util
from typing import Any

import pytest
import torch

from eyas.drafters.common.heads_and_rope import draft_rope
from eyas.drafters.common.layers import Rotary
from eyas.drafters.eagle3.config import draft_config_for
from eyas.drafters.eagle3.model import Eagle3Draft
from eyas.errors import UserError
from tiny import make_spec

THETA = {"rope_theta": 50000.0}
YARN = {
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 32.0,
    **THETA,
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", **THETA},
    "linear": {"rope_type": "linear", "factor": 4.0, **THETA},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
        **THETA,
    },
    "yarn": YARN,
    "yarn of DeepSeek": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
    "yarn of GPT-OSS": {**YARN, "truncate": False},
    "partial": {"rope_type": "default", "partial_rotary_factor": 0.5, **THETA},
    "of two kinds of layers": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
    },
    "longrope": {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [4.0] * 16, **THETA},
}


def draft_of(rope: dict[str, Any], **changes: Any) -> Any:
    spec = make_spec(
        hidden_size=128, head_dim=32, max_position_embeddings=8192, rope_parameters=rope, **changes
    )
    return draft_config_for(spec, 20)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ROPES)
def test_vllm_rotates_as_the_trainer_does_up_to_the_last_position(name: str) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    config = draft_of(ROPES[name])
    positions = torch.tensor([0, 1, 511, 512, 2047, 2048, 5000, 8191])
    x = torch.randn(len(positions), 4, 32)
    ours = Rotary(config)(x, positions)
    with set_current_vllm_config(VllmConfig()):
        rotary = get_rope(32, config.max_position_embeddings, rope_parameters=dict(config.rope_parameters))
        theirs, _ = rotary.forward_native(positions, x.flatten(1).clone(), x.flatten(1).clone())
    torch.testing.assert_close(theirs.unflatten(1, (4, 32)), ours, rtol=1e-4, atol=1e-4)


def test_base_and_scaling_are_carried_over_and_what_engines_read_differently_is_not() -> None:
    assert draft_rope(ROPES["llama3"]) == ROPES["llama3"]
    assert draft_rope(ROPES["yarn of DeepSeek"]) == YARN
    assert draft_rope(ROPES["longrope"]) == draft_rope(ROPES["partial"]) == ROPES["default"]
    assert draft_rope(ROPES["of two kinds of layers"])["rope_theta"] == 1000000.0
    assert draft_rope({}) == {"rope_type": "default", "rope_theta": 10000.0}


def test_heads_are_the_targets_where_they_suit() -> None:
    draft = draft_config_for(
        make_spec(hidden_size=576, num_attention_heads=9, num_key_value_heads=3, head_dim=64), 20
    )
    assert (draft.num_attention_heads, draft.num_key_value_heads, draft.head_dim) == (9, 3, 64)


@pytest.mark.parametrize(
    ("width", "heads", "kv_heads", "head_dim"),
    [(7168, 56, 8, 128), (2048, 16, 8, 128), (5120, 40, 8, 128), (192, 3, 3, 64), (1664, 13, 1, 128)],
)
def test_a_target_with_latent_attention_gets_a_draft_with_sensible_heads(
    width: int, heads: int, kv_heads: int, head_dim: int
) -> None:
    latent = {"kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    spec = make_spec(
        hidden_size=width, num_attention_heads=64, num_key_value_heads=64, latent_attention=latent
    )
    draft = draft_config_for(spec, 20)
    assert (draft.num_attention_heads, draft.num_key_value_heads, draft.head_dim) == (
        heads,
        kv_heads,
        head_dim,
    )


def test_a_width_without_sensible_heads_is_refused() -> None:
    with pytest.raises(UserError, match="width 200 does not divide into heads of 128, 64 or 32"):
        draft_config_for(make_spec(hidden_size=256), 20, hidden_size=200)


@torch.no_grad()
def test_a_narrower_draft_starts_from_the_main_directions_of_its_target() -> None:
    spec = make_spec(hidden_size=64, vocab_size=200)
    draft = Eagle3Draft(draft_config_for(spec, 200, hidden_size=32))
    # A target whose head lies in 32 of its 64 directions loses nothing.
    head = torch.randn(200, 32) @ torch.randn(32, 64)
    norm = torch.rand(64) + 0.5
    draft.initialise(head, head, norm, {}, seed=0)
    assert draft.embed_tokens.weight.requires_grad
    assert draft.embed_tokens.weight.shape == (200, 32)
    draft.fc.weight[:, :-64] = 0
    hidden = torch.randn(10, 3, 64)
    expected = (hidden[:, -1] * norm) @ head.T
    found = draft.lm_head(draft.fuse(hidden))
    assert float(torch.nn.functional.cosine_similarity(found, expected).min()) > 0.9
