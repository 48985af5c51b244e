"""States of unlike architectures in the real vLLM; benchmarks/targets_in_vllm.py runs all of them."""

import importlib.util
from pathlib import Path

import pytest

from families import make_family
from tiny import spec_of
from vllm_cases import mixed_samples, reference_states, states_by_id, worst_difference

pytestmark = [
    pytest.mark.xdist_group("vllm"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
    # vLLM warns of much that is not ours.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("deepseek-v3", "native"),  # layers of another signature, shared experts
        ("gemma2", "worker"),  # a class without the facility; capped attention, scaled embedding
        ("gpt-oss", "native"),  # sinks, experts with biases
    ],
)
def test_every_layer_equals_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, way: str
) -> None:
    from eyas.engines.vllm.engine import VllmEngine

    # Its kernels for latent attention on a CPU take heads of 576 only; plain attention takes these.
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    folder = make_family(tmp_path / name, name)
    spec = spec_of(folder, (1, 2, 3))
    samples = mixed_samples([1, 7, 64, 65, 200], vocab_size=spec.vocab_size)
    known = reference_states(folder, spec, samples)
    engine = VllmEngine(folder, spec, batch_tokens=64, batch_size=4, in_process=True)
    assert engine.way == way
    found = states_by_id(engine.capture(samples))
    engine.close()
    assert worst_difference(found, known) < 1e-5
