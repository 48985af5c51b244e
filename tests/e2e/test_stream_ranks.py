"""train.source=stream on two ranks: with an engine each, and on a fleet that both share."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_stream_run import ALONE, TRAIN, CrashingLate, make, record, write_streamed

from eyas.config.load import load_config
from eyas.engines.transformers.engine import TransformersEngine
from eyas.errors import EyasError
from eyas.stages import capture_run, train
from eyas.stages.run_context import RunContext
from eyas.train.loop import Trainer
from eyas.train.ranks import Ranks
from pipeline import eyas, snapshot, write_run
from rank_cases import run_ranks

# Two micro-batches a rank.
# A rate at which rounding stays small; that of this width by itself is 25 times higher.
SHARED = {"batches_per_step": 4, "batch_tokens": 80, "learning_rate": 5e-4}
STREAM_BYTES = 200_000
Change = Callable[[Ranks], None]


def run_stage(ranks: Ranks, run_file: Path, settings: tuple[str, ...], change: Change | None) -> Any:
    """Run the stage train as one of ``ranks``; return what it says when it fails, or its exit code."""
    train.join_ranks = lambda device: ranks  # type: ignore[assignment]
    train.leave_ranks = lambda: None  # type: ignore[assignment]
    if change is not None:
        change(ranks)
    try:
        train.train(RunContext(load_config(run_file, settings)))
    except EyasError as error:
        return error.what
    except SystemExit as error:
        return error.code
    except RuntimeError as error:
        return str(error)
    return 0


def on_two(
    folder: Path, run_file: Path, *settings: str, change: Change | None = None, name: str = "meet"
) -> list[Any]:
    return run_ranks(2, folder / name, run_stage, run_file, settings, change)


def last_weights(folder: Path) -> dict[str, torch.Tensor]:
    steps = (folder / "run" / "checkpoints").glob("step-*")
    return load_file(max(steps, key=lambda p: p.name) / "draft.safetensors")


def equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], two[name]) for name in one)


def extracted(folder: Path, target: Path, **settings: Any) -> Path:
    """Return the run file of a stream whose held-out states are there."""
    run_file = write_streamed(folder, target, stream_bytes=STREAM_BYTES, **(SHARED | settings))
    for stage in ("prepare", "regenerate", "extract"):
        assert eyas(stage, "-c", run_file).code == 0
    return run_file


@pytest.fixture(scope="module")
def stored(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks train from a store."""
    folder = tmp_path_factory.mktemp("stored")
    run_file = write_run(folder, tiny_target, extract=ALONE, train={"num_epochs": 2} | TRAIN | SHARED)
    for stage in ("prepare", "regenerate", "extract"):
        assert eyas(stage, "-c", run_file).code == 0
    assert on_two(folder, run_file) == [0, 0]
    return folder


def test_two_ranks_train_from_a_stream_what_they_train_from_a_store_bit_for_bit(
    stored: Path, tiny_target: Path, tmp_path: Path
) -> None:
    run_file = extracted(tmp_path, tiny_target)
    assert on_two(tmp_path, run_file) == [0, 0]
    two = last_weights(tmp_path)
    assert equal(last_weights(stored), two)
    found = record(tmp_path, "checkpoints")["stream"]
    assert found["num_trainers"] == 2
    assert STREAM_BYTES / 2 < found["peak_bytes"] <= STREAM_BYTES
    assert found["num_windows"] > 3
    num_tokens = 2 * record(tmp_path, "regenerated")["counts"]["train_tokens"]
    assert found["num_tokens"] == found["num_captured"] == num_tokens, "no sample is captured by both"
    # Each rank has an engine, so as many engines as trainers worked.
    ratio = found["engine_s"] / (2 * found["trainer_s"])
    assert found["engines_per_trainer"] == pytest.approx(ratio, rel=0.05)
    layers = record(tmp_path, "checkpoints")["layers"]

    assert eyas("train", "-c", run_file, "--fresh").code == 0
    one = last_weights(tmp_path)
    # To rounding, which products in bfloat16 (Muon) make larger: 7e-6 on one processor, 1.3e-5 on another.
    assert all((one[name] - two[name]).abs().max() < 5e-5 for name in one)
    alone = record(tmp_path, "checkpoints")["layers"]
    for layer, figures in layers["train"].items():
        assert figures == pytest.approx(alone["train"][layer]), "the figures are of all ranks"


class CrashingSooner(CrashingLate):
    dies_at = 8
    error = EyasError("out of memory")


def the_second_engine_dies(ranks: Ranks) -> None:
    if not ranks.is_first:
        capture_run.make_engine = lambda context: make(context, CrashingSooner)  # type: ignore[assignment]


def test_ranks_one_of_which_fails_end_together_and_go_on_to_the_same_draft_and_kept_states(
    stored: Path, tiny_target: Path, tmp_path: Path
) -> None:
    run_file = extracted(tmp_path, tiny_target)
    keep = "train.keep_states=true"
    codes = on_two(tmp_path, run_file, keep, change=the_second_engine_dies)
    assert codes == [1, "out of memory"], "only the one that knows why says it"
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert on_two(tmp_path, run_file, keep, name="again") == [0, 0]
    assert equal(last_weights(stored), last_weights(tmp_path))
    kept = tmp_path / "run" / "states" / "train_streamed"
    assert {p.name for p in kept.glob("journal*")} == {"journal-rank-0.jsonl", "journal-rank-1.jsonl"}
    num_tokens = record(tmp_path, "regenerated")["counts"]["train_tokens"]
    assert record(tmp_path, "checkpoints")["stream"]["num_captured"] <= num_tokens
    # One process reads what two have kept, and needs no engine.
    before = snapshot(kept)
    screen = eyas("train", "-c", run_file, keep, "train.num_epochs=1", "--fresh")
    assert screen.code == 0, screen.err
    assert "no engine is needed" in screen.err
    assert snapshot(kept) == before


class Other(TransformersEngine):
    """Holds another target, which is right in itself."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        with torch.no_grad():
            self.model.get_decoder().layers[0].mlp.down_proj.weight *= 1.05


def the_second_engine_is_another(ranks: Ranks) -> None:
    if not ranks.is_first:
        capture_run.make_engine = lambda context: make(context, Other)  # type: ignore[assignment]


def test_engines_of_ranks_that_give_other_states_teach_nothing(tiny_target: Path, tmp_path: Path) -> None:
    code, said = on_two(tmp_path, extracted(tmp_path, tiny_target), change=the_second_engine_is_another)
    assert code == 1
    assert "differ on rank 1 and on rank 0" in said
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))


def slow_steps(ranks: Ranks) -> None:
    """Make the trainers slower than the engine."""
    step = Trainer._step

    def slow(self: Trainer, *arguments: Any) -> None:
        step(self, *arguments)
        time.sleep(0.1)

    Trainer._step = slow  # type: ignore[method-assign]


@pytest.mark.xdist_group("ray")
def test_one_fleet_feeds_both_ranks_in_bounded_memory_and_a_dead_engine_costs_a_retry(
    stored: Path, tiny_target: Path, tmp_path: Path
) -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    from test_extract_fleet import kill_one_at_work

    run_file = extracted(tmp_path, tiny_target)
    killed: list[int] = []
    stop = threading.Event()
    killer = threading.Thread(target=kill_one_at_work, args=(killed, stop))
    killer.start()
    given = 5 * STREAM_BYTES // 2  # the share of a unit is that of a rank with an engine of its own
    settings = ("extract.fleet={replicas: 1, gpus_per_replica: 0}", f"train.stream_bytes={given}")
    codes = on_two(tmp_path, run_file, *settings, change=slow_steps)
    stop.set()
    killer.join()
    assert codes == [0, 0]
    assert len(killed) == 1
    assert equal(last_weights(stored), last_weights(tmp_path))
    found = json.loads((tmp_path / "run" / "checkpoints" / "stage.json").read_text())["stream"]
    assert found["peak_bytes"] <= STREAM_BYTES
    assert found["num_captured"] == found["num_tokens"]
    assert found["num_trainers"] == 2
