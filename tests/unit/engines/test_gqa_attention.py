"""Attention of one-token steps is the family's own: by definition, and against the full forward pass."""

from pathlib import Path

import numpy as np
import pytest
import torch

from eyas.engines.gqa_attention import _attention
from eyas.engines.transformers.engine import TransformersEngine
from families import TINY, make_family
from slow_reference import attend_once
from tiny import spec_of

HEADS, KV_HEADS, WIDTH, VALUE_WIDTH, T = 6, 2, 8, 5, 9


def make_inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return (
        torch.randn(2, HEADS, 1, WIDTH).to(dtype),
        torch.randn(2, KV_HEADS, T, WIDTH).to(dtype),
        torch.randn(2, KV_HEADS, T, VALUE_WIDTH).to(dtype),
    )


def expected(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor, scale: float
) -> np.ndarray:
    rows = [
        attend_once(q[:, 0], k, v, s, scale)
        for q, k, v, s in zip(*(x.double().numpy() for x in (query, key, value)), seen.numpy(), strict=True)
    ]
    return np.stack(rows)[:, None]


@pytest.mark.parametrize("scaling", [None, 0.0117, 0.5])
@pytest.mark.parametrize("mask", ["none", "bool", "additive"])
def test_a_step_attends_by_definition_with_the_scale_of_its_family(scaling: float | None, mask: str) -> None:
    query, key, value = make_inputs()
    seen = torch.ones(2, T, dtype=torch.bool)
    if mask != "none":
        seen[0, :4] = False  # padding on the left
    given = {
        "none": None,
        "bool": seen[:, None, None],
        "additive": torch.zeros(2, 1, 1, T).masked_fill(~seen[:, None, None], float("-inf")),
    }[mask]
    module = torch.nn.Module()
    found, _ = _attention(module, query, key, value, given, scaling=scaling)
    assert found.shape == (2, 1, HEADS, VALUE_WIDTH)
    scale = WIDTH**-0.5 if scaling is None else scaling
    np.testing.assert_allclose(found.numpy(), expected(query, key, value, seen, scale), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_step_in_16_bits_is_the_definition_within_its_rounding(dtype: torch.dtype) -> None:
    query, key, value = make_inputs(dtype)
    seen = torch.ones(2, T, dtype=torch.bool)
    found, _ = _attention(torch.nn.Module(), query, key, value, None)
    assert found.dtype == dtype
    exact = expected(query, key, value, seen, WIDTH**-0.5)
    np.testing.assert_allclose(found.double().numpy(), exact, atol=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("name", ["llama", "granite", "gemma3", "deepseek-v3"])
def test_a_decoded_token_has_the_logits_of_the_full_forward(tmp_path: Path, name: str) -> None:
    """Attention scales are configured so that the family's differs from the usual one."""
    assert name in TINY
    folder = make_family(tmp_path / name, name)
    engine = TransformersEngine(folder, spec_of(folder))
    if name in ("llama", "granite", "deepseek-v3"):
        assert engine.model.config._attn_implementation == "eyas_grouped"
    ids = list(range(5, 25))
    session = engine.session()
    session.extend(ids[:10])
    steps = torch.cat([session.extend([token])[0] for token in ids[10:]])
    with torch.inference_mode():
        whole = engine.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    torch.testing.assert_close(steps.float(), whole[10:], rtol=1e-3, atol=1e-3)
    assert float(whole.std()) > 0.05
