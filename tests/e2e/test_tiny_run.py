"""The main job from one command, on a random target: every stage, again, and after interruptions."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from safetensors.torch import load_file

from machine import wait_until
from pipeline import Screen, eyas, snapshot, write_run

STAGES = ["prepare", "regenerate", "extract", "train", "export", "evaluate"]
FOLDERS = ["prepared", "regenerated", "states", "checkpoints", "draft", "evaluation"]


@pytest.fixture(scope="module")
def finished(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Screen]:
    """Return a folder with a run file, and the screen of its run."""
    folder = tmp_path_factory.mktemp("finished")
    screen = eyas("run", "-c", write_run(folder, tiny_target))
    assert screen.code == 0, screen.err
    return folder, screen


def stage_record(folder: Path, stage: str) -> dict[str, Any]:
    path = folder / "run" / FOLDERS[STAGES.index(stage)] / "stage.json"
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def test_the_run_ends_with_its_figure(finished: tuple[Path, Screen]) -> None:
    last = finished[1].out.splitlines()[-1]
    assert re.fullmatch(
        r"acceptance length: \d\.\d\d \(K=2, held-out, 3 prompts, 95 %: \d\.\d\d to \d\.\d\d\)", last
    )


def test_data_goes_to_stdout_and_progress_to_stderr(finished: tuple[Path, Screen]) -> None:
    _, screen = finished
    assert "identical outputs" in screen.out
    assert "Warning" not in screen.out + screen.err
    assert "it/s" not in screen.err, "a bar of another library"
    for stage in STAGES:
        assert f"{stage}: " in screen.err
        assert f"{stage}: " not in screen.out


def test_a_whole_run_says_what_each_stage_wrote_and_at_its_end_what_comes_next(
    finished: tuple[Path, Screen],
) -> None:
    folder, screen = finished
    for stage, name in zip(STAGES[:-1], FOLDERS[:-1], strict=True):
        assert f"{stage}: wrote {folder / 'run' / name}" in screen.err
    assert screen.err.splitlines()[-1] == f"next: eyas serve {folder / 'run' / 'draft'} -k 2"
    assert screen.err.count("next: ") == 1


def test_the_run_folder_holds_what_the_design_says(finished: tuple[Path, Screen]) -> None:
    run = finished[0] / "run"
    assert {p.name for p in run.iterdir()} >= {"run.yaml", "report.html", *FOLDERS}
    assert all(stage_record(finished[0], stage)["done"] for stage in STAGES)
    assert not [p for p in run.rglob("*") if p.name.startswith(".") or p.name.endswith((".tmp", ".old"))]


def test_outputs_with_the_draft_are_the_targets_own_and_the_prediction_is_exact(
    finished: tuple[Path, Screen],
) -> None:
    report = stage_record(finished[0], "evaluate")["report"]
    assert report["identical"] == report["num_prompts"] == 3
    assert report["differences"] == []
    assert report["predicted"] == report["acceptance"]
    assert report["predicted_rates"] == report["acceptance_rates"]
    assert 1 <= report["acceptance"] <= 3
    conditions = ("dtype", "device", "temperature", "max_new_tokens", "num_draft_tokens")
    assert [report[c] for c in conditions] == ["float32", "cpu", 0.0, 12, 2]


def test_the_export_is_a_folder_of_the_names_engines_load(finished: tuple[Path, Screen]) -> None:
    folder = finished[0] / "run" / "draft"
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    assert {"fc.weight", "norm.weight", "lm_head.weight", "d2t"} <= set(tensors)
    assert tensors["lm_head.weight"].shape == (120, 32)
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]


def test_the_report_is_one_file_with_its_curves(finished: tuple[Path, Screen]) -> None:
    page = (finished[0] / "run" / "report.html").read_text()
    assert "http" not in re.sub(r"http-equiv", "", page)
    charts = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert len(charts) >= 2
    for chart in charts:
        assert ElementTree.fromstring(chart).findall(".//polyline") is not None
    assert "command line" not in page
    assert "# file" in page


def test_a_second_run_does_nothing_and_says_so(finished: tuple[Path, Screen]) -> None:
    folder, first = finished
    before = snapshot(folder)
    again = eyas("run", "-c", folder / "run.yaml")
    assert again.code == 0
    for stage in STAGES:
        assert f"{stage}: already done" in again.err
    changed = {name for name, digest in snapshot(folder).items() if before.get(name) != digest}
    assert changed <= {"run/report.html", "run/process/process.json", "run/process/progress.json"}
    assert again.out == first.out


def test_other_draft_tokens_in_serving_leave_what_was_trained_alone(finished: tuple[Path, Screen]) -> None:
    folder, _ = finished
    for stage in ("train", "export"):
        screen = eyas(stage, "-c", folder / "run.yaml", "evaluate.num_draft_tokens=3")
        assert screen.code == 0, screen.err
        assert f"{stage}: already done" in screen.err
    # What ranks checkpoints is a setting of training.
    screen = eyas("train", "-c", folder / "run.yaml", "train.validate_draft_tokens=2")
    assert screen.code == 2
    assert "train.validate_draft_tokens was 3 and is 2" in screen.err


def test_the_resolved_run_file_runs_too(finished: tuple[Path, Screen]) -> None:
    folder, first = finished
    again = eyas("run", "-c", folder / "run" / "run.yaml")
    assert again.code == 0, again.err
    assert again.out == first.out


def test_the_same_run_elsewhere_gives_the_same_draft(
    tmp_path: Path, tiny_target: Path, finished: tuple[Path, Screen]
) -> None:
    run_file = write_run(tmp_path, tiny_target)
    for stage in STAGES:
        screen = eyas(stage, "-c", run_file)
        assert screen.code == 0, screen.err
    for name in ("draft/model.safetensors", "draft/config.json", "states/train/shard-00000.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (finished[0] / "run" / name).read_bytes(), name


def test_fresh_redoes_a_stage_and_the_next_refuse_to_mix(tmp_path: Path, tiny_target: Path) -> None:
    run_file = write_run(tmp_path, tiny_target)
    assert eyas("run", "-c", run_file).code == 0
    more = ("train.learning_rate=0.02",)
    assert eyas("train", "-c", run_file, "--fresh", *more).code == 0
    refused = eyas("export", "-c", run_file, *more)
    assert refused.code == 2
    assert 'draft is stale: train was done again: train.learning_rate was "auto" and is 0.02' in refused.err
    assert eyas("export", "-c", run_file, "--fresh", *more).code == 0


def test_the_answers_in_the_data_can_be_trained_on(tmp_path: Path, tiny_target: Path) -> None:
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"count to {i}"},
                {"role": "assistant", "content": "1 2 3 " * 4},
            ]
        }
        for i in range(20)
    ]
    run_file = write_run(tmp_path, tiny_target, regenerate={"enabled": False})
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    screen = eyas("run", "-c", run_file)
    assert screen.code == 0, screen.err
    assert not (tmp_path / "run" / "regenerated").exists()
    report = stage_record(tmp_path, "evaluate")["report"]
    assert report["identical"] == report["num_prompts"]


def test_prompts_are_chosen_whose_answers_are_known_as_far_as_they_are_decoded(
    tmp_path: Path, tiny_target: Path
) -> None:
    """Here regeneration stops early, so decoding goes on where the stored states end."""
    run_file = write_run(tmp_path, tiny_target, regenerate={"max_new_tokens": 6})
    for stage in STAGES[:-1]:
        assert eyas(stage, "-c", run_file).code == 0
    screen = eyas("evaluate", "-c", run_file, "evaluate.num_prompts=100")
    assert screen.code == 0, screen.err
    report = stage_record(tmp_path, "evaluate")["report"]
    assert 1 <= report["num_prompts"] < 8
    assert report["predicted"] == report["acceptance"]
    assert eyas("evaluate", "-c", run_file, "--fresh", "evaluate.max_new_tokens=7").code == 0
    report = stage_record(tmp_path, "evaluate")["report"]
    assert report["predicted"] == report["acceptance"]


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "eyas", *map(str, arguments)]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


def interrupt_when(path: Path, arguments: list[str], signal_number: int) -> int:
    """Start a command, send it a signal as soon as ``path`` exists, and return its exit code."""
    process = subprocess.Popen(arguments, env=environment(), stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: path.exists() or process.poll() is not None, every_s=0.002)
        process.send_signal(signal_number)
        return process.wait(timeout=300)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("sign_of_life", "signal_number"),
    [
        ("regenerated/answers.jsonl", signal.SIGKILL),
        ("states/train/shard-00001.safetensors", signal.SIGKILL),
        ("checkpoints/step-000002/checkpoint.json", signal.SIGKILL),
        ("checkpoints/step-000002/checkpoint.json", signal.SIGINT),
    ],
)
def test_an_interrupted_run_goes_on_and_ends_with_the_same_draft(
    tmp_path: Path,
    tiny_target: Path,
    finished: tuple[Path, Screen],
    sign_of_life: str,
    signal_number: int,
) -> None:
    run_file = write_run(tmp_path, tiny_target)
    code = interrupt_when(tmp_path / "run" / sign_of_life, command("run", "-c", run_file), signal_number)
    # The machine may be quick enough to finish first; what must hold then holds all the more.
    assert code in (-signal.SIGKILL, 130, 0)
    screen = eyas("run", "-c", run_file)
    assert screen.code == 0, screen.err
    for name in ("draft/model.safetensors", "draft/config.json"):
        assert (tmp_path / "run" / name).read_bytes() == (finished[0] / "run" / name).read_bytes(), name


def test_extraction_redoes_only_the_shard_that_was_lost(
    tmp_path: Path, tiny_target: Path, finished: tuple[Path, Screen], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash in the third shard: every other one that was written is kept, byte for byte and untouched."""
    from eyas.store.shards import ShardWriter

    run_file = write_run(tmp_path, tiny_target)
    for before in ("prepare", "regenerate"):
        assert eyas(before, "-c", run_file).code == 0
    write = ShardWriter.write

    def full_disk(self: ShardWriter, shard: int, *arguments: Any) -> Any:
        if shard == 2:
            raise OSError(28, "No space left on device")
        return write(self, shard, *arguments)

    monkeypatch.setattr(ShardWriter, "write", full_disk)
    screen = eyas("extract", "-c", run_file)
    assert screen.code == 1
    assert "No space left on device" in screen.err
    assert "run the same command again" in screen.err
    monkeypatch.undo()
    store = tmp_path / "run" / "states" / "train"
    kept = {p: p.stat().st_mtime_ns for p in sorted(store.glob("shard-*"))}
    # Shards are written behind the engine, so one after the third may be whole already.
    numbers = {int(p.stem.removeprefix("shard-")) for p in kept}
    assert {0, 1} <= numbers
    assert 2 not in numbers
    assert eyas("run", "-c", run_file).code == 0
    assert {p: p.stat().st_mtime_ns for p in kept} == kept
    wanted = finished[0] / "run" / "states" / "train"
    assert {p.name: p.read_bytes() for p in store.glob("shard-*")} == {
        p.name: p.read_bytes() for p in wanted.glob("shard-*")
    }


def test_a_lost_shard_does_not_stop_a_finished_run_from_being_mended(
    tmp_path: Path, tiny_target: Path
) -> None:
    run_file = write_run(tmp_path, tiny_target)
    for stage in ("prepare", "regenerate", "extract"):
        assert eyas(stage, "-c", run_file).code == 0
    shard = tmp_path / "run" / "states" / "train" / "shard-00001.safetensors"
    content = shard.read_bytes()
    shard.unlink()
    refused = eyas("train", "-c", run_file)
    assert refused.code == 1
    assert "shard-00001.safetensors is damaged" in refused.err
    assert "run the same eyas extract again" in refused.err
    assert eyas("extract", "-c", run_file).code == 0
    assert shard.read_bytes() == content
    assert eyas("train", "-c", run_file).code == 0
