"""The draft's decoder layer is a Llama layer that reads two vectors; where the two coincide they agree."""

import dataclasses

import pytest
import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3RotaryEmbedding,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from eyas.drafters.common.attention import PackedKeys, SequenceKeys
from eyas.drafters.common.layers import llama_config
from eyas.drafters.eagle3.config import draft_config_for
from eyas.drafters.eagle3.model import Eagle3Draft
from tiny import make_spec

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


def make_draft(rope: str = "default", **shape: int) -> Eagle3Draft:
    draft = Eagle3Draft(draft_config_for(make_spec(rope_parameters=ROPES[rope]), 20, **shape))
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (1 if parameter.ndim == 1 else 0))
    return draft


def one_step(draft: Eagle3Draft, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    return draft(tokens, hidden, torch.arange(len(tokens)), SequenceKeys(None))


@pytest.mark.parametrize("rope", ROPES)
def test_a_draft_that_ignores_the_token_is_a_llama_layer(rope: str) -> None:
    draft = make_draft(rope)
    config = llama_config(draft.config)
    config._attn_implementation = "eager"
    theirs = LlamaDecoderLayer(config, layer_idx=0)
    attention, width = draft.layer(0).self_attn, draft.config.hidden_size
    with torch.no_grad():
        for name in ("q_proj", "k_proj", "v_proj"):
            ours = getattr(attention, name).weight
            ours[:, :width] = 0  # the half that reads the token
            getattr(theirs.self_attn, name).weight.copy_(ours[:, width:])
        theirs.self_attn.o_proj.weight.copy_(attention.o_proj.weight)
        theirs.mlp.load_state_dict(draft.layer(0).mlp.state_dict())
        theirs.input_layernorm.weight.copy_(draft.layer(0).hidden_norm.weight)
        theirs.post_attention_layernorm.weight.copy_(draft.layer(0).post_attention_layernorm.weight)

        num = 40
        hidden = torch.randn(num, width)
        tokens = torch.randint(0, 50, (num,))
        positions = torch.arange(num)[None]
        causal = torch.full((num, num), float("-inf")).triu(1)[None, None]
        expected = theirs(
            hidden[None],
            attention_mask=causal,
            position_ids=positions,
            position_embeddings=LlamaRotaryEmbedding(config)(hidden[None], positions),
        )
        found = one_step(draft, tokens, hidden)
    torch.testing.assert_close(found, expected[0] if expected.ndim == 3 else expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mscale", [None, 0.8, 1.0])
def test_latent_attention_is_that_of_deepseek_v3(mscale: float | None) -> None:
    rope = {**ROPES["yarn"], "factor": 40.0}
    if mscale is not None:
        rope |= {"mscale": mscale, "mscale_all_dim": 1.0}
    latent = {
        "q_lora_rank": 12,
        "kv_lora_rank": 10,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 8,
        "v_head_dim": 7,
    }
    spec = make_spec(num_key_value_heads=4, latent_attention=latent, rope_parameters=rope)
    draft = Eagle3Draft(draft_config_for(spec, 20, attention="mla"))
    width = draft.config.hidden_size
    config = DeepseekV3Config(
        hidden_size=width,
        num_attention_heads=4,
        num_key_value_heads=4,
        rms_norm_eps=draft.config.rms_norm_eps,
        max_position_embeddings=512,
        rope_parameters=rope,
        **latent,
    )
    config._attn_implementation = "eager"
    theirs = DeepseekV3Attention(config, layer_idx=0)
    own = draft.layer(0).self_attn
    num = 40
    hidden, positions = torch.randn(num, width), torch.arange(0, 3 * num, 3)
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (1 if parameter.ndim == 1 else 0))
        weights = {
            # What reads two vectors reads the second one here.
            name: p[:, width:] if p.ndim == 2 and p.shape[1] == 2 * width else p
            for name, p in own.named_parameters()
        }
        theirs.load_state_dict(weights)
        causal = torch.full((num, num), float("-inf")).triu(1)[None, None]
        rotation = DeepseekV3RotaryEmbedding(config)(hidden[None], positions[None])
        expected, _ = theirs(hidden[None], rotation, causal)
        mixed = torch.cat([torch.zeros_like(hidden), hidden], -1)
        keys, values = own.keys_values(mixed, draft.rotary, positions)
        attended = SequenceKeys(None)(0, own.queries(mixed, draft.rotary, positions), keys, values)
        found = own.o_proj(attended.flatten(1))
    # The norms in the middle have an epsilon of their own there.
    torch.testing.assert_close(found, expected[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [{}, {"num_layers": 2}, {"num_layers": 3}], ids=["one", "two", "three"])
def test_rows_have_the_same_output_from_every_cache(shape: dict[str, int]) -> None:
    """Packed with others, in one sequence, in pieces, and where only some of them are wanted."""
    draft = make_draft(**shape)
    tokens, hidden, positions = torch.arange(9), torch.randn(9, 16), torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4])
    documents = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 1])
    with torch.no_grad():
        whole = [
            draft(tokens[d], hidden[d], positions[d], SequenceKeys(None)) for d in (slice(0, 4), slice(4, 9))
        ]
        expected = torch.cat(whole)
        packed, some = PackedKeys(documents, None), PackedKeys(documents, None)
        packed.begin(torch.arange(9))
        wanted = torch.tensor([1, 3, 6, 8])
        some.begin(wanted)
        torch.testing.assert_close(draft(tokens, hidden, positions, packed), expected)
        torch.testing.assert_close(draft(tokens, hidden, positions, some, wanted), expected[wanted])
        keys = SequenceKeys(None)
        first = draft(tokens[4:7], hidden[4:7], positions[4:7], keys, slice(-1, None))
        fork = keys.fork()
        draft(tokens[:2], hidden[:2], positions[7:9], fork)
        rest = draft(tokens[7:], hidden[7:], positions[7:], keys)
        torch.testing.assert_close(torch.cat([first, rest]), expected[6:])
        assert (keys.num_rows, fork.num_rows) == (5, 5)


def test_the_token_a_row_reads_matters() -> None:
    draft = make_draft()
    hidden = torch.randn(6, 16)
    with torch.no_grad():
        a = one_step(draft, torch.tensor([1, 2, 3, 4, 5, 6]), hidden)
        b = one_step(draft, torch.tensor([1, 2, 3, 9, 5, 6]), hidden)
    changed = (a - b).abs().amax(-1) > 1e-6
    assert changed.tolist() == [False, False, False, True, True, True]


def test_only_the_embedding_is_frozen() -> None:
    draft = make_draft()
    assert set(dict(draft.named_parameters())) - set(draft.trainable()) == {"embed_tokens.weight"}


def test_tensor_names_are_those_the_engines_load() -> None:
    assert set(make_draft().trainable()) == {
        "fc.weight",
        "norm.weight",
        "lm_head.weight",
        "layers.0.input_layernorm.weight",
        "layers.0.hidden_norm.weight",
        "layers.0.post_attention_layernorm.weight",
        "layers.0.self_attn.q_proj.weight",
        "layers.0.self_attn.k_proj.weight",
        "layers.0.self_attn.v_proj.weight",
        "layers.0.self_attn.o_proj.weight",
        "layers.0.mlp.gate_proj.weight",
        "layers.0.mlp.up_proj.weight",
        "layers.0.mlp.down_proj.weight",
    }


def test_initialisation_starts_from_the_target_and_is_the_same_for_the_same_seed() -> None:
    embedding, rows, norm = torch.randn(50, 16), torch.randn(20, 16), torch.rand(16)
    drafts = []
    for seed in (5, 5, 6):
        draft = Eagle3Draft(draft_config_for(make_spec(), 20))
        draft.initialise(embedding, rows, norm, {}, seed)
        drafts.append(draft.state_dict())
    first, same, other = drafts
    assert torch.equal(first["embed_tokens.weight"], embedding)
    assert torch.equal(first["lm_head.weight"], rows)
    assert torch.equal(first["norm.weight"], norm)
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["fc.weight"], other["fc.weight"])


def test_a_draft_of_another_shape_takes_what_fits_of_the_targets_last_layer() -> None:
    spec = make_spec()
    wide = dataclasses.replace(
        draft_config_for(spec, 20, intermediate_size=2 * spec.intermediate_size), num_attention_heads=8
    )
    target = Eagle3Draft(draft_config_for(spec, 20)).layer(0)
    last_layer = {n: torch.randn_like(p) for n, p in target.named_parameters() if "self_attn" not in n}
    last_layer |= {
        f"self_attn.{n}.weight": torch.randn(rows, 16) for n, rows in (("q_proj", 16), ("k_proj", 8))
    } | {"self_attn.o_proj.weight": torch.randn(16, 16)}
    draft = Eagle3Draft(wide)
    draft.initialise(torch.randn(50, 16), torch.randn(20, 16), torch.rand(16), last_layer, 0)
    own = dict(draft.layer(0).named_parameters())
    assert torch.equal(own["self_attn.k_proj.weight"][:, 16:], last_layer["self_attn.k_proj.weight"])
    for name in ("mlp.down_proj.weight", "mlp.up_proj.weight", "self_attn.o_proj.weight"):
        assert own[name].std() < 0.03, name  # noise: twice as wide as the target's


def test_with_fc_norm_only_head_norm_and_embedding_start_from_the_target() -> None:
    spec = make_spec()
    embedding, head, norm = torch.randn(50, 16), torch.randn(20, 16), torch.rand(16)
    plain = Eagle3Draft(draft_config_for(spec, 20))
    last_layer = {n: torch.randn_like(p) for n, p in plain.layer(0).named_parameters()}
    draft = Eagle3Draft(draft_config_for(spec, 20, fc_norm=True))
    draft.initialise(embedding, head, norm, last_layer, 0)
    for mine, target in ((draft.embed_tokens, embedding), (draft.lm_head, head), (draft.norm, norm)):
        assert torch.equal(mine.weight, target)
    for name, parameter in (*draft.fc.named_parameters(), *draft.layer(0).named_parameters()):
        if parameter.ndim == 2:
            assert parameter.abs().max() < 0.1, name
