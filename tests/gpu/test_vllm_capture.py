"""The real vLLM on a GPU: its connector's CUDA streams, its hooks, and two ranks over NCCL."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from vllm_cases import (
    NUM_LAYERS,
    make_model,
    mixed_samples,
    reference_states,
    sample_of,
    spec_of_model,
    states_by_id,
    worst_difference,
)

pytest.importorskip("vllm", reason="vllm is not installed")

from eyas.config.schema import VllmSettings
from eyas.engines.base import ProbeOutput
from eyas.engines.vllm.engine import VllmEngine
from eyas.engines.vllm.state_transfer import layer_digests

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]

AUX = tuple(range(NUM_LAYERS))
TOLERANCE = 5e-2  # between batches, in bfloat16
# From one token to several chunks of 64, and more requests than the four slots.
LENGTHS = [1, 2, 7, 33, 64, 65, 100, 200, 255, 256, 31, 5]
RANKS = [
    1,
    pytest.param(2, marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a target whose heads are as wide as GPU kernels want them."""
    shape = {"hidden_size": 512, "intermediate_size": 512, "head_dim": 128, "initializer_range": 0.05}
    return make_model(tmp_path_factory.mktemp("models") / "llama", **shape)


@pytest.fixture(scope="module", params=RANKS, ids=lambda n: f"{n}-ranks")
def num_ranks(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module", params=["native", "worker"])
def engine(request: pytest.FixtureRequest, folder: Path, num_ranks: int) -> Iterator[VllmEngine]:
    settings = VllmSettings(
        capture=request.param,
        tensor_parallel_size=num_ranks,
        gpu_memory_utilization=0.3,
        engine_args=("attention_backend=FLASH_ATTN",),
    )
    spec = spec_of_model(folder, AUX, "bfloat16")
    torch.zeros(1).pin_memory()  # this process has used CUDA, so a forked one could not
    made = VllmEngine(folder, spec, settings=settings, batch_tokens=64, batch_size=4)
    yield made
    made.close()


def test_every_layer_equals_transformers(engine: VllmEngine, folder: Path) -> None:
    samples = mixed_samples(LENGTHS)
    found = states_by_id(engine.capture(samples))
    exact = reference_states(folder, spec_of_model(folder, AUX), samples)
    rounding = worst_difference(reference_states(folder, engine.spec, samples), exact)
    assert worst_difference(found, exact) < 2 * rounding


def test_a_prompt_given_many_times_gets_the_same_states_each_time(engine: VllmEngine) -> None:
    ids = mixed_samples([200], seed=5)[0].input_ids
    copies = states_by_id(engine.capture([sample_of(f"copy-{i}", ids) for i in range(40)]))
    assert worst_difference(copies, dict.fromkeys(copies, copies["copy-0"])) < TOLERANCE


def test_every_rank_holds_the_states_that_were_written(engine: VllmEngine, num_ranks: int) -> None:
    for probe_output in engine.probe_outputs(mixed_samples([3, 40, 90])):
        assert isinstance(probe_output, ProbeOutput)
        own = layer_digests(torch.cat([probe_output.states.aux, probe_output.states.last[:, None]], dim=1))
        assert probe_output.rank_digests == (own,) * num_ranks
