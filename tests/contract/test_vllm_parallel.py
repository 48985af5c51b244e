"""The real vLLM with its workers in processes of their own, two tensor-parallel ranks."""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from vllm_cases import (
    NUM_LAYERS,
    make_model,
    mixed_samples,
    reference_states,
    skip_where_refused,
    spec_of_model,
    states_by_id,
    worst_difference,
)

pytest.importorskip("vllm", reason="vllm is not installed")

from eyas.config.schema import VllmSettings
from eyas.engines.base import ProbeOutput
from eyas.engines.vllm.engine import VllmEngine
from eyas.engines.vllm.rpc import call_all_ranks
from eyas.engines.vllm.state_transfer import layer_digests
from eyas.errors import EyasError

pytestmark = pytest.mark.filterwarnings("ignore")

LENGTHS = [1, 2, 33, 64, 65, 200, 255]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module", params=["native", "worker"])
def engine(request: pytest.FixtureRequest, folder: Path) -> Iterator[VllmEngine]:
    spec = spec_of_model(folder, tuple(range(NUM_LAYERS)))
    settings = VllmSettings(capture=request.param, tensor_parallel_size=2)
    skip_where_refused(request.param, spec, num_ranks=2)
    made = VllmEngine(folder, spec, settings=settings, batch_tokens=64, batch_size=4)
    yield made
    made.close()


def test_states_of_two_ranks_equal_transformers(engine: VllmEngine, folder: Path) -> None:
    samples = mixed_samples(LENGTHS)
    found = states_by_id(engine.capture(samples))
    assert worst_difference(found, reference_states(folder, engine.spec, samples)) < 1e-5


def test_both_ranks_checksum_the_same_states(engine: VllmEngine) -> None:
    for probe_output in engine.probe_outputs(mixed_samples([3, 40, 90])):
        assert isinstance(probe_output, ProbeOutput)
        own = layer_digests(torch.cat([probe_output.states.aux, probe_output.states.last[:, None]], dim=1))
        assert probe_output.rank_digests == (own, own)


def test_each_rank_answers_once_and_a_failure_names_its_rank(engine: VllmEngine) -> None:
    session = engine._capturing()
    descriptions = call_all_ranks(session.llm, 2, dict, "describe")
    assert [d["num_layers"] for d in descriptions] == [NUM_LAYERS, NUM_LAYERS]
    with pytest.raises(EyasError, match="no_such failed on rank 0: AttributeError"):
        call_all_ranks(session.llm, 2, dict, "no_such")


def test_a_killed_worker_ends_the_capture_with_an_error(engine: VllmEngine) -> None:
    # The last test here: this engine is gone afterwards.
    engine._capturing()
    os.kill(_workers()[-1], signal.SIGKILL)
    with pytest.raises(EyasError, match="vLLM stopped: ") as error:
        list(engine.capture(mixed_samples([200] * 40)))
    assert error.value.hint == "complete shards are kept: run the same command again; its log is above"


def _workers() -> list[int]:
    """Return the ids of the worker processes of this process's vLLM, which its engine process has started."""
    engines = {process.pid for process in multiprocessing.active_children()}
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if parent in engines and "Worker" in (entry / "comm").read_text():
                    found.append(int(entry.name))
    return sorted(found)
