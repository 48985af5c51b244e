"""What belongs together in a run, what may vary, and what is never lost."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest

from eyas.engines.info import Installed
from eyas.engines.vllm.info import VllmInfo
from pipeline import eyas, snapshot, write_prompts, write_run


@pytest.fixture(scope="module")
def finished(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    screen = eyas("run", "-c", write_run(folder, tiny_target))
    assert screen.code == 0, screen.err
    return folder


@pytest.fixture
def run_file(finished: Path, tmp_path: Path) -> Path:
    """The run file of a finished run that a test may change."""
    shutil.copytree(finished / "run", tmp_path / "run")
    path = tmp_path / "run.yaml"
    path.write_text((finished / "run.yaml").read_text().replace(str(finished / "run"), str(tmp_path / "run")))
    return path


def test_an_evaluation_that_cannot_start_deletes_nothing(run_file: Path) -> None:
    run = run_file.parent / "run"
    before = snapshot(run / "evaluation")
    refused = eyas("evaluate", "-c", run_file, "--endpoint", "http://127.0.0.1:9/v1", "--fresh")
    assert refused.code == 2
    assert "evaluate.endpoint=http://127.0.0.1:9/v1 does not answer" in refused.err
    assert snapshot(run / "evaluation") == before
    assert sorted(p.name for p in run.iterdir() if p.name.startswith("evaluation")) == ["evaluation"]
    assert "stale" not in eyas("status", "-c", run_file).out


def test_what_was_made_from_an_older_draft_is_stale_everywhere(run_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    screen = eyas("train", "-c", run_file, "--fresh", "train.num_epochs=2")
    assert screen.code == 0, screen.err
    cause = "train was done again: train.num_epochs was 1 and is 2"
    states = json.loads(eyas("status", "-c", run_file, "--json", "train.num_epochs=2").out)
    assert states["state"] == "stale"
    found = {name: (stage["state"], stage["cause"]) for name, stage in states["stages"].items()}
    assert found["train"] == ("done", None)
    assert found["export"] == ("stale", cause)
    assert found["evaluate"] == ("stale", "export is stale")
    assert "train.num_epochs was 2 and is 1" in eyas("status", "-c", run_file).out, "of these settings"
    figures = json.loads(eyas("compare", run, "--json").out)["figures"]
    assert figures["stale: export"] == [cause]
    assert not any("decoded" in name for name in figures)
    for path in (run / "report.html", run / "draft" / "README.md"):
        assert "Stale:</b>" in path.read_text()
    assert f"is stale: {cause}" in eyas("serve", run / "draft", "--print").err
    refused = eyas("evaluate", "-c", run_file, "train.num_epochs=2")
    assert refused.code == 2
    assert f"draft is stale: {cause}" in refused.err
    assert "hint: run: eyas export --fresh -c" in refused.err


def test_a_run_with_other_training_settings_keeps_what_does_not_depend_on_them(
    run_file: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    kept = {name: snapshot(run / name) for name in ("prepared", "regenerated", "states")}
    screen = eyas("run", "-c", run_file, "train.num_epochs=2")
    assert screen.code == 0, screen.err
    assert "train: is done again: train.num_epochs was 1 and is 2" in screen.err
    assert {name: snapshot(run / name) for name in kept} == kept
    assert "Stale:" not in (run / "report.html").read_text()
    assert not list(run.glob("*.redo"))
    refused = eyas("run", "-c", run_file, "data.max_length=90")
    assert refused.code == 2
    assert "prepared is stale: data.max_length was 96 and is 90" in refused.err


def test_a_stage_says_which_settings_of_earlier_ones_it_does_not_change(
    run_file: Path, tmp_path: Path
) -> None:
    screen = eyas("export", "-c", run_file, "--fresh", "train.num_epochs=3")
    assert screen.code == 0, screen.err
    assert "earlier stages keep what they were made with: train.num_epochs" in screen.err
    assert "num_epochs: 1  # the run" in (tmp_path / "run" / "run.yaml").read_text()


def test_another_run_takes_the_stages_that_are_the_same(run_file: Path, tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    varied = (f"run_dir={other}", f"base_run={run}", "train.num_epochs=2")
    before = snapshot(run)
    screen = eyas("run", "-c", run_file, *varied)
    assert screen.code == 0, screen.err
    links = {p.name for p in other.iterdir() if p.is_symlink()}
    assert links == {"prepared", "regenerated", "states"}
    assert snapshot(run) == before
    assert eyas("run", "-c", run_file, *varied).code == 0
    # Both may be moved together; what the base run does again is no longer what the other was made from.
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for folder in (run, other):
        shutil.move(folder, moved / folder.name)
    figures = json.loads(eyas("compare", moved / "run", moved / "other", "--json").out)["figures"]
    assert not any(name.startswith("stale") for name in figures)
    again = (f"run_dir={moved / 'run'}", "extract.states_dtype=float8_e4m3fn", "--fresh")
    assert eyas("extract", "-c", run_file, *again).code == 0
    figures = json.loads(eyas("compare", moved / "other", "--json").out)["figures"]
    assert "stale: train" in figures
    assert "acceptance length, decoded" not in figures


def test_a_single_stage_takes_what_comes_before_it_from_the_base(run_file: Path, tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    varied = (f"run_dir={other}", f"base_run={run}", "train.num_epochs=2")
    screen = eyas("train", "-c", run_file, *varied)
    assert screen.code == 0, screen.err
    assert {p.name for p in other.iterdir() if p.is_symlink()} == {"prepared", "regenerated", "states"}
    assert screen.err.splitlines()[-1] == f"next: eyas export -c {other / 'run.yaml'}"
    # What the base does not have is not made in passing.
    refused = eyas("train", "-c", run_file, *varied, f"run_dir={tmp_path / 'third'}", "data.max_length=90")
    assert refused.code == 2
    assert "third/prepared has not finished" in refused.err
    assert "hint: run: eyas prepare -c" in refused.err


def test_a_run_means_the_same_from_another_folder(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(finished, tmp_path / "work")
    text = (finished / "run.yaml").read_text().replace(f"{finished}/", "")
    (tmp_path / "work" / "run.yaml").write_text(text)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "work" / "run")
    for here in ("work", "elsewhere", "work/run"):
        monkeypatch.chdir(tmp_path / here)
        run_file = Path(*[".."] * len(Path(here).parts), "work", "run.yaml")
        screen = eyas("run", "-c", run_file, "evaluate.num_prompts=1")
        assert screen.code == 0, screen.err
        assert ("evaluate: already done" in screen.err) == (here != "work")
        assert "finished" in eyas("status", run_file.parent / "run").out
        assert "stale" not in eyas("status", "-c", run_file, "evaluate.num_prompts=1").out


def test_clean_keeps_states_for_a_run_that_took_them_and_has_no_draft(run_file: Path, tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    varied = (f"run_dir={other}", f"base_run={run}", "train.num_epochs=2")
    assert eyas("train", "-c", run_file, *varied).code == 0
    states = snapshot(run / "states")
    said = eyas("clean", run, "--yes").out
    assert f"states kept for {other}" in said
    assert snapshot(run / "states") == states
    assert eyas("export", "-c", run_file, *varied).code == 0
    assert "states kept" not in eyas("clean", run, "--yes").out
    assert not list((run / "states" / "train").glob("*.safetensors"))


def test_a_run_is_done_again_from_a_stage_on(run_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    kept = snapshot(run / "states")
    screen = eyas("run", "-c", run_file, "--from", "train")
    assert screen.code == 0, screen.err
    assert snapshot(run / "states") == kept
    assert "extract: already done" in screen.err
    assert "train: already done" not in screen.err


def test_samples_from_elsewhere_work_in_a_whole_run(run_file: Path, tmp_path: Path) -> None:
    other = (
        f"run_dir={tmp_path / 'other'}",
        f"extract.prepared_data={tmp_path / 'run' / 'regenerated'}",
        "regenerate.enabled=false",
        "data.sources=[]",
    )
    for _ in range(2):
        screen = eyas("run", "-c", run_file, *other)
        assert screen.code == 0, screen.err
    assert "train: already done" in screen.err


def test_a_sweep_pays_for_the_targets_work_once(run_file: Path, tmp_path: Path) -> None:
    swept = ("--vary", "train.learning_rate=1e-3,2e-3", "--vary", "seed=0", "evaluate.num_prompts=1")
    screen = eyas("sweep", "-c", run_file, *swept, "--json")
    assert screen.code == 0, screen.err
    found = json.loads(screen.out)
    assert [Path(name).name for name in found["runs"]] == [
        "run-learning_rate=1e-3,seed=0",
        "run-learning_rate=2e-3,seed=0",
    ]
    assert found["settings"]["train.learning_rate"] == ["0.001", "0.002"]
    assert screen.err.count("extract: taken from") == 2
    listed = json.loads(eyas("runs", tmp_path, "--json").out)
    assert len(listed) == 3
    assert all(one["stage"] == "evaluate" and one["acceptance"] >= 1 for one in listed)
    assert eyas("runs", tmp_path / "nothing").code == 2


def test_a_sweep_without_an_earlier_run_shares_the_stages_of_its_first(
    tmp_path: Path, tiny_target: Path
) -> None:
    path = write_run(tmp_path, tiny_target)
    screen = eyas("sweep", "-c", path, "--vary", "train.learning_rate=1e-3,2e-3,4e-3")
    assert screen.code == 0, screen.err
    assert screen.err.count("regenerate: taken from") == 2
    assert screen.err.count("extract: taken from") == 2
    assert not (tmp_path / "run").exists()


def test_clean_frees_states_and_keeps_drafts_and_reports(run_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    before = snapshot(run)
    said = eyas("clean", run)
    assert "would be freed" in said.out
    assert snapshot(run) == before
    assert eyas("clean", run, "--yes").code == 0
    gone = before.keys() - snapshot(run).keys()
    assert gone
    assert all(name.startswith(("states/train/", "checkpoints/step-")) for name in gone)
    screen = eyas("run", "-c", run_file)
    assert screen.code == 0, screen.err
    assert "freed, and nothing needs them" in screen.err
    assert "train: already done" in screen.err
    screen = eyas("run", "-c", run_file, "train.num_epochs=2")
    assert screen.code == 0, screen.err
    assert list((run / "states" / "train").glob("*.safetensors")), "captured again"


def test_make_clean_keeps_runs() -> None:
    text = (Path(__file__).parents[2] / "Makefile").read_text()
    assert "runs" not in text[text.index("\nclean:") :].split()


def test_evaluations_with_other_settings_stand_next_to_each_other(run_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = json.loads((run / "evaluation" / "report.json").read_text())
    screen = eyas("evaluate", "-c", run_file, "evaluate.num_draft_tokens=3", "evaluate.num_prompts=2")
    assert screen.code == 0, screen.err
    report = json.loads((run / "evaluation" / "report.json").read_text())
    assert report["num_draft_tokens"] == 3
    (other,) = (run / "evaluations").iterdir()
    assert json.loads((other / "report.json").read_text()) == first
    for path in (run / "report.html", run / "draft" / "README.md"):
        text = path.read_text()
        assert "2 held-out prompts, greedy" in text
        assert other.name in text
        assert f"acceptance length {first['acceptance']:.3f} with K = 2" in text
    # The run's own settings: nothing is measured again.
    screen = eyas("run", "-c", run_file)
    assert screen.code == 0, screen.err
    assert "evaluate: already done" in screen.err
    assert json.loads((run / "evaluation" / "report.json").read_text()) == first
    assert "K=2, held-out" in screen.out
    assert len(list((run / "evaluations").iterdir())) == 1
    assert "3 held-out prompts, greedy" in (run / "draft" / "README.md").read_text()
    figures = json.loads(eyas("compare", run, "--json").out)["figures"]
    assert not any(name.startswith("stale") for name in figures), "run.yaml is of the evaluation shown"
    assert "stale" not in eyas("status", run).out


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("extract.engine=vllm", "vllm"),
        ("train.trackers=[wandb]", "train.trackers names wandb, which is not installed"),
        ("train.num_gpus=4", "4 GPUs cannot share train.batches_per_step=1"),
        ("data.max_length=4096", "data.max_length=4096 is more than the target's 512 positions"),
        ("data.sources=[missing.jsonl]", "missing.jsonl"),
        ("train.device=cuda", "train.device=cuda: there are 0 GPUs here"),
        ("train.device=gpu", "train.device=gpu is not a device"),
        ("extract.states_dir=s3x://bucket/a", "s3x://bucket/a"),
        ("regenerate.endpoint=http://127.0.0.1:9/v1", "does not answer"),
        ("base_run=nowhere", "base_run=nowhere is not a run folder"),
    ],
)
def test_what_a_late_stage_would_refuse_is_refused_first_and_found_by_doctor(
    tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch, setting: str, said: str
) -> None:
    monkeypatch.setattr(
        VllmInfo, "installed", lambda self: Installed(None, "vllm is not installed", "install it")
    )
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "wandb" else find(name, *a)
    )
    path = write_run(tmp_path, tiny_target)
    screen = eyas("run", "-c", path, "--json", setting)
    assert screen.code == 2
    assert said in screen.err
    event = json.loads(screen.out.splitlines()[-1])
    assert (event["event"], event["exit_code"]) == ("error", 2)
    assert said in event["what"]
    assert not (tmp_path / "run").exists(), "refused before the first stage"
    found = eyas("doctor", "-c", path, setting)
    assert found.code == 1
    assert said in found.out


@pytest.mark.parametrize("command", ["run", "prepare"])
def test_what_is_refused_at_its_start_leaves_no_empty_folder(
    tmp_path: Path, tiny_target: Path, command: str
) -> None:
    path = write_run(tmp_path, tiny_target, run_dir=str(tmp_path / "runs" / "deep" / "a"))
    (tmp_path / "kept").mkdir()
    for run_dir in ("runs/deep/a", "kept/a"):
        refused = eyas(command, "-c", path, f"run_dir={tmp_path / run_dir}", "data.sources=[absent.jsonl]")
        assert refused.code == 2
    assert not (tmp_path / "runs").exists()
    assert list((tmp_path / "kept").iterdir()) == []


def test_a_wrong_key_is_an_event_too(tmp_path: Path, tiny_target: Path) -> None:
    screen = eyas("run", "-c", write_run(tmp_path, tiny_target), "--json", "train.epochs=2")
    assert json.loads(screen.out)["exit_code"] == 2


@pytest.mark.parametrize("form", ["native", "speculators"])
def test_a_draft_from_elsewhere_is_measured_and_inspected_without_a_run(
    run_file: Path, tmp_path: Path, tiny_target: Path, form: str
) -> None:
    if form == "speculators":
        assert eyas("export", "-c", run_file, "--fresh", "export.format=speculators").code == 0
    draft = Path(shutil.copytree(tmp_path / "run" / "draft", tmp_path / "published"))
    (draft / "stage.json").unlink()
    config = json.loads((draft / "config.json").read_text())
    config.pop("eyas", None)  # what only eyas writes
    (draft / "config.json").write_text(json.dumps(config))
    prompts = write_prompts(tmp_path / "more.jsonl", num=4)
    screen = eyas(
        "evaluate", "--draft", draft, "--target", tiny_target, "--data", prompts, "-o", tmp_path / "out",
        "evaluate.max_new_tokens=12", "evaluate.num_draft_tokens=2",
    )  # fmt: skip
    assert screen.code == 0, screen.err
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (report["num_prompts"], report["identical"], report["predicted"]) == (4, 4, None)
    assert f"{report['acceptance']:.3f} (K=2)" in screen.out
    screen = eyas("inspect", "draft", draft)
    assert screen.code == 0, screen.err
    rows = dict(line.split("  ", 1) for line in screen.out.splitlines())
    assert rows["kind"].strip() == "eagle3"
    assert rows["format"].strip() == form
    assert "2, 4, 5" in screen.out or form == "speculators"


def test_a_run_folder_stands_for_its_draft(finished: Path) -> None:
    for words in (("serve", finished / "run", "--print"), ("inspect", "draft", finished / "run")):
        screen = eyas(*words)
        assert screen.code == 0, screen.err
        assert str(finished / "run" / "draft") in screen.out


def test_a_draft_without_prompts_or_target_is_refused(finished: Path, tmp_path: Path) -> None:
    screen = eyas("evaluate", "--draft", finished / "run")
    assert screen.code == 2
    assert "there are no prompts to decode" in screen.err


def test_a_run_that_was_moved_is_found_by_its_folder(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = Path(shutil.move(tmp_path / "run", tmp_path / "moved"))
    for words in (("-c", moved), ("-c", moved / "run.yaml"), (moved,)):
        screen = eyas("status", *words)
        assert screen.code == 0, screen.err
        assert screen.out.startswith(f"{moved}: ")
        assert screen.out.count("done") == 6
    screen = eyas("evaluate", moved, "evaluate.num_prompts=2")
    assert screen.code == 0, screen.err
    assert not (tmp_path / "run").exists()
    monkeypatch.chdir(moved)
    assert eyas("status").out.count("done") == 6
    monkeypatch.chdir(tmp_path)
    assert eyas("status", "moved", "--json").code == 0
