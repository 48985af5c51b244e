"""train.source=stream: the same run without states to train on, interrupted, refused, and reported."""

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import bad_engines
from eyas.engines.transformers.engine import TransformersEngine
from eyas.store.window_store import StreamedStates
from eyas.train.checkpoint import best_checkpoint
from eyas.types import Failure, HiddenStates, TokenizedSample
from pipeline import Screen, eyas, snapshot, write_run

# One sample at a time: batches of other samples would round otherwise.
ALONE = {"batch_size": 1, "batch_tokens": 256, "shard_bytes": 60_000}
STREAM_BYTES = 150_000
TRAIN: dict[str, Any] = {
    "batch_tokens": 256,
    "validate_every": 2,
    "save_every": 1,
    "device": "cpu",
}


@pytest.fixture(scope="module")
def stored(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run that trained from a store."""
    folder = tmp_path_factory.mktemp("stored")
    run_file = write_run(folder, tiny_target, extract=ALONE, train={"num_epochs": 2} | TRAIN)
    assert eyas("run", "-c", run_file).code == 0
    return folder


def write_streamed(folder: Path, target: Path, **train: Any) -> Path:
    settings = TRAIN | {"num_epochs": 2, "source": "stream", "stream_bytes": STREAM_BYTES} | train
    return write_run(folder, target, extract=ALONE, train=settings)


@pytest.fixture(scope="module")
def streamed(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Screen]:
    folder = tmp_path_factory.mktemp("streamed")
    screen = eyas("run", "-c", write_streamed(folder, tiny_target))
    assert screen.code == 0, screen.err
    return folder, screen


def record(folder: Path, stage: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run" / stage / "stage.json").read_text())
    return found


def best_weights(folder: Path) -> dict[str, torch.Tensor]:
    best = best_checkpoint(folder / "run" / "checkpoints")
    assert best is not None
    return load_file(best / "draft.safetensors")


def test_a_streamed_run_trains_the_draft_of_a_stored_one_bit_for_bit(
    stored: Path, streamed: tuple[Path, Screen]
) -> None:
    folder, _ = streamed
    assert record(folder, "checkpoints")["history"] == record(stored, "checkpoints")["history"]
    one, two = best_weights(stored), best_weights(folder)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_only_held_out_states_are_stored_and_the_memory_bound_is_kept(streamed: tuple[Path, Screen]) -> None:
    folder, _ = streamed
    states = folder / "run" / "states"
    assert sorted(p.name for p in states.iterdir() if p.is_dir()) == ["held_out"]
    found = record(folder, "checkpoints")["stream"]
    assert found["num_windows"] > 3
    assert STREAM_BYTES / 2 < found["peak_bytes"] <= STREAM_BYTES
    assert found["num_tokens"] == 2 * record(folder, "regenerated")["counts"]["train_tokens"]


def test_the_run_says_who_waited_for_whom_and_the_record_keeps_it(streamed: tuple[Path, Screen]) -> None:
    folder, screen = streamed
    found = record(folder, "checkpoints")["stream"]
    ratio = found["engines_per_trainer"]
    assert ratio == pytest.approx(found["engine_s"] / found["trainer_s"], rel=0.05)
    (line,) = [line for line in screen.err.splitlines() if "-bound: " in line]
    assert ("engine-bound" if ratio >= 1 else "trainer-bound") in line
    assert "here, the held-out samples only" in screen.err


def test_the_report_shows_the_layers_that_were_streamed(streamed: tuple[Path, Screen]) -> None:
    folder, _ = streamed
    page = (folder / "run" / "report.html").read_text()
    for layer, figures in record(folder, "checkpoints")["layers"]["train"].items():
        assert f"<td>{layer}, train</td>" in page
        assert f"{figures['rms']:.4g}" in page


def test_a_finished_streamed_run_is_left_alone(streamed: tuple[Path, Screen]) -> None:
    folder, _ = streamed
    before = snapshot(folder / "run" / "checkpoints")
    screen = eyas("run", "-c", folder / "run.yaml")
    assert screen.code == 0
    assert "train: already done" in screen.err
    assert snapshot(folder / "run" / "checkpoints") == before


def test_a_stream_that_breaks_goes_on_to_the_same_draft(
    streamed: tuple[Path, Screen],
    tiny_target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_file = write_streamed(tmp_path, tiny_target)
    for stage in ("prepare", "regenerate", "extract"):
        assert eyas(stage, "-c", run_file).code == 0
    with monkeypatch.context() as patched:
        patched.setattr("eyas.stages.capture_run.make_engine", lambda context: make(context, CrashingLate))
        screen = eyas("train", "-c", run_file)
    assert screen.code == 1
    assert "out of memory" in screen.err
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))
    screen = eyas("train", "-c", run_file)
    assert screen.code == 0, screen.err
    one, two = best_weights(streamed[0]), best_weights(tmp_path)
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("Failing", "1 samples failed"),
        ("Losing", "lost 1 samples"),
        ("Swapping", "last states do not predict the tokens that follow"),
        ("AlwaysShifted", "probe, teacher"),
    ],
)
def test_an_engine_that_does_wrong_teaches_the_draft_nothing(
    tiny_target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: str,
    words: str,
) -> None:
    run_file = write_streamed(tmp_path, tiny_target)
    for stage in ("prepare", "regenerate", "extract"):
        assert eyas(stage, "-c", run_file).code == 0
    bad = getattr(bad_engines, engine)
    monkeypatch.setattr("eyas.stages.capture_run.make_engine", lambda context: make(context, bad))
    screen = eyas("train", "-c", run_file)
    assert screen.code == 1
    assert words in screen.err
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))


def make(context: Any, engine: type[TransformersEngine]) -> TransformersEngine:
    return engine(context.target_folder, context.spec, device="cpu", batch_tokens=256, batch_size=1)


class CrashingLate(TransformersEngine):
    """Dies when training is well under way."""

    num_captured, dies_at = 0, 30
    error: Exception = RuntimeError("CUDA error: out of memory")

    def capture(self, samples: Iterable[TokenizedSample]) -> Iterator[HiddenStates | Failure]:
        for item in super().capture(samples):
            sample_id = item.sample_id if isinstance(item, Failure) else item.sample.sample_id
            self.num_captured += not sample_id.startswith(("probe", "prefix"))
            if self.num_captured == self.dies_at:
                raise self.error
            yield item


class Drifting(TransformersEngine):
    """Is right until its second window, as an engine is whose memory is overwritten."""

    def capture(self, samples: Iterable[TokenizedSample]) -> Iterator[HiddenStates | Failure]:
        asked = list(samples)
        if len(asked) > 1 and not asked[0].sample_id.startswith("probe"):
            self.num_windows = getattr(self, "num_windows", 0) + 1
            if self.num_windows == 2:
                with torch.no_grad():
                    self.model.get_decoder().layers[0].mlp.down_proj.weight *= 1.05
        yield from super().capture(asked)


def test_an_engine_that_drifts_teaches_nothing_from_then_on(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_file = write_streamed(tmp_path, tiny_target)
    for stage in ("prepare", "regenerate", "extract"):
        assert eyas(stage, "-c", run_file).code == 0
    monkeypatch.setattr("eyas.stages.capture_run.make_engine", lambda context: make(context, Drifting))
    told: list[int] = []
    hold = StreamedStates._hold

    def counted(self: StreamedStates, groups: Any, number: int) -> None:
        hold(self, groups, number)
        told.append(len(groups))

    monkeypatch.setattr(StreamedStates, "_hold", counted)
    screen = eyas("train", "-c", run_file)
    assert screen.code == 1
    assert "error: probe" in screen.err
    assert len(told) == 1, "only the first window was handed over"
    steps = [int(p.name.removeprefix("step-")) for p in (tmp_path / "run" / "checkpoints").glob("step-*")]
    assert max(steps) == told[0]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (
            "train.num_gpus=2 extract.engine=vllm vllm.tensor_parallel_size=2",
            "each of 2 ranks captures on its own GPU",
        ),
        ("extract.max_failures=3", "does not go with extract.max_failures"),
        ("train.source=store train.keep_states=true", "extract keeps all states anyway"),
        ("extract.states_dtype=float8_e4m3fn", "does not go with extract.states_dtype"),
    ],
)
def test_settings_that_a_stream_cannot_follow_are_refused_before_anything_is_done(
    tiny_target: Path, tmp_path: Path, setting: str, words: str
) -> None:
    screen = eyas("run", "-c", write_streamed(tmp_path, tiny_target), *setting.split(" "))
    assert screen.code == 2
    assert words in screen.err
    assert not (tmp_path / "run").exists()


def test_a_window_too_small_for_one_step_is_refused_with_the_bytes_that_it_takes(
    streamed: tuple[Path, Screen],
) -> None:
    screen = eyas("train", "-c", streamed[0] / "run.yaml", "train.stream_bytes=1000", "--fresh")
    assert screen.code == 2
    assert "more than train.stream_bytes=1,000" in screen.err
    assert "hint: set train.stream_bytes=" in screen.err


def test_states_that_are_all_stored_are_not_streamed_again(stored: Path) -> None:
    screen = eyas("run", "-c", stored / "run.yaml", "train.source=stream")
    assert screen.code == 2
    assert "train on them with train.source=store" in screen.err
    assert (stored / "run" / "states" / "train" / "manifest.json").is_file()


@pytest.fixture(scope="module")
def kept(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A streamed run that kept its states in a folder of their own."""
    folder = tmp_path_factory.mktemp("kept")
    run_file = write_streamed(folder, tiny_target, keep_states=True)
    assert eyas("run", "-c", run_file, f"extract.states_dir={folder / 'shared'}").code == 0
    return folder


def test_kept_states_serve_the_second_epoch_and_the_draft_is_the_same(stored: Path, kept: Path) -> None:
    found = record(kept, "checkpoints")["stream"]
    train_tokens = record(kept, "regenerated")["counts"]["train_tokens"]
    assert (found["num_captured"], found["num_tokens"]) == (train_tokens, 2 * train_tokens)
    one, two = best_weights(stored), best_weights(kept)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_later_run_reads_kept_states_in_another_order_without_an_engine(
    kept: Path, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_engine(context: Any) -> Any:
        raise AssertionError("an engine was started")

    settings = (f"extract.states_dir={kept / 'shared'}", f"data.sources=[{kept / 'prompts.jsonl'}]")
    run_file = write_streamed(tmp_path, tiny_target, keep_states=True, batch_tokens=200)
    for stage in ("prepare", "regenerate"):
        assert eyas(stage, "-c", run_file, *settings).code == 0
    monkeypatch.setattr("eyas.stages.capture_run.make_engine", no_engine)
    for stage in ("extract", "train"):
        screen = eyas(stage, "-c", run_file, *settings)
        assert screen.code == 0, screen.err
    assert "no engine is needed" in screen.err
    assert record(tmp_path, "checkpoints")["layers"] == record(kept, "checkpoints")["layers"]


def keeping_until_a_crash(folder: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of a run whose engine died with some of the states kept."""
    run_file = write_streamed(folder, target, keep_states=True)
    for stage in ("prepare", "regenerate", "extract"):
        assert eyas(stage, "-c", run_file).code == 0
    with monkeypatch.context() as patched:
        patched.setattr("eyas.stages.capture_run.make_engine", lambda context: make(context, CrashingLate))
        patched.setattr(CrashingLate, "dies_at", 12)
        assert eyas("train", "-c", run_file).code == 1
    return run_file


def test_a_stream_that_keeps_goes_on_after_a_crash_and_ends_with_the_same_shards(
    kept: Path, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_file = keeping_until_a_crash(tmp_path, tiny_target, monkeypatch)
    states = tmp_path / "run" / "states" / "train_streamed"
    assert list(states.glob("shard-*"))
    screen = eyas("train", "-c", run_file)
    assert screen.code == 0, screen.err
    shards = [snapshot(folder) for folder in (states, kept / "shared" / "train_streamed")]
    same = [{n: s for n, s in found.items() if n.startswith("shard-")} for found in shards]
    assert same[0] == same[1]
    one, two = best_weights(kept), best_weights(tmp_path)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_some_states_kept_in_another_order_are_refused_and_redone_with_fresh(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_file = keeping_until_a_crash(tmp_path, tiny_target, monkeypatch)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    other = eyas("train", "-c", run_file, "train.batch_tokens=200")
    assert other.code == 2
    assert "keeps some of the states, in the order of another training" in other.err
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert eyas("train", "-c", run_file, "train.batch_tokens=200", "--fresh").code == 0
