"""What can be done with a finished run: its report in a browser, compared, carded, pushed, planned from."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import eyas as eyas_package
from eyas.config.load import load_config
from eyas.report.page import prediction_note
from eyas.stages.run_context import RunContext, finished_run
from machine import wait_until
from pipeline import Screen, eyas, write_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def finished(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run file, and two finished runs of it: run and other."""
    folder = tmp_path_factory.mktemp("finished")
    run_file = write_run(folder, tiny_target)
    screen = eyas("run", "-c", run_file, "--json")
    assert screen.code == 0, screen.err
    (folder / "events.jsonl").write_text(screen.out)
    shutil.copytree(folder / "run", folder / "other")
    for stage in ("checkpoints", "draft", "evaluation"):
        shutil.rmtree(folder / "other" / stage)
    other = (f"run_dir={folder / 'other'}", "train.learning_rate=1e-5", "train.trackers=[tensorboard]")
    screen = eyas("run", "-c", run_file, *other)
    assert screen.code == 0, screen.err
    return folder


def test_curves_reach_a_tracker_that_the_run_names(finished: Path) -> None:
    assert list((finished / "other" / "tensorboard").glob("events.*"))
    assert not (finished / "run" / "tensorboard").exists()


def dom_of(page: Path, *flags: str) -> str:
    if CHROMIUM is None:
        pytest.skip("no Chromium here")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", *flags]
    done = subprocess.run(
        [*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=300, check=True
    )
    return done.stdout


def test_json_lines_tell_the_whole_run(finished: Path) -> None:
    events = [json.loads(line) for line in (finished / "events.jsonl").read_text().splitlines()]
    assert [e["stage"] for e in events if e["event"] == "stage" and e["state"] == "done"] == [
        "prepare", "regenerate", "extract", "train", "export", "evaluate",
    ]  # fmt: skip
    assert events[-1]["event"] == "result"
    assert events[-1]["report"]["acceptance"] >= 1
    assert Path(events[-1]["page"]).is_file()


def test_an_error_is_an_event_too(tmp_path: Path, tiny_target: Path) -> None:
    screen = eyas("run", "-c", write_run(tmp_path, tiny_target), "--json", "target.model=./nowhere")
    event = json.loads(screen.out.splitlines()[-1])
    assert (event["event"], event["exit_code"]) == ("error", 2)
    assert event["what"] == "there is no model folder ./nowhere"
    assert screen.code == 2


@pytest.mark.parametrize("width", [390, 1200])
@pytest.mark.parametrize("scheme", ["0", "1"], ids=["dark", "light"])
def test_the_report_fits_a_phone_and_a_desk_in_a_real_browser(
    finished: Path, tmp_path: Path, width: int, scheme: str
) -> None:
    page = (finished / "run" / "report.html").read_text()
    script = (
        "<script>addEventListener('load',()=>{const s=getComputedStyle(document.body);"
        "document.title=[document.documentElement.scrollWidth<=innerWidth,"
        "s.backgroundColor,[...document.querySelectorAll('.example')].length,"
        "[...document.querySelectorAll('svg')].every(x=>x.getBoundingClientRect().height>50)].join('|')})</script>"
    )
    (tmp_path / "page.html").write_text(page.replace("</body>", script + "</body>"))
    dom = dom_of(
        tmp_path / "page.html",
        f"--window-size={width},900",
        f"--blink-settings=preferredColorScheme={scheme}",
    )
    title = re.search(r"<title>(.*?)</title>", dom)
    assert title
    fits, background, examples, drawn = title.group(1).split("|")
    assert fits == "true", "the page scrolls sideways"
    assert background == ("rgb(22, 24, 27)" if scheme == "0" else "rgb(255, 255, 255)")
    assert (examples, drawn) == ("3", "true")


def test_the_report_has_every_part(finished: Path) -> None:
    page = (finished / "run" / "report.html").read_text()
    headings = re.findall(r"<h2>(.*?)</h2>", page)
    assert headings == [
        "Acceptance by position", "Examples", "Loss", "Acceptance length while training", "Data",
        "Hidden states", "Checks passed",
    ]  # fmt: skip
    assert "Settings and versions" in page
    assert "http" not in page
    assert 'class="rejected"' in page


@pytest.mark.parametrize(
    ("settings", "said"),
    [((), None), (("regenerate.enabled=false",), "answers in the data"),
     (("regenerate.temperature=0.8",), "temperature 0.8")],
)  # fmt: skip
def test_a_prediction_of_other_texts_is_said(
    finished: Path, settings: tuple[str, ...], said: str | None
) -> None:
    loaded = load_config(finished / "run.yaml", settings)
    run = finished_run(RunContext(load_config(finished / "run.yaml")))
    note = prediction_note(dataclasses.replace(run, loaded=loaded))
    assert note is None if said is None else said in str(note)


def test_two_runs_side_by_side(finished: Path, tmp_path: Path) -> None:
    runs = (finished / "run", finished / "other")
    screen = eyas("compare", *runs, "-o", tmp_path / "compared.html")
    assert screen.code == 0, screen.err
    lines = screen.out.splitlines()
    assert lines[0].split() == [str(r) for r in runs]
    assert any(line.split() == ["train.learning_rate", "auto", "1e-05"] for line in lines)
    assert not any("data.max_length" in line for line in lines)
    assert len(re.findall("<polyline", (tmp_path / "compared.html").read_text())) == 4
    found = json.loads(eyas("compare", *runs, "--json").out)
    assert len(found["figures"]["acceptance length, decoded"]) == 2


def test_the_card_has_the_measured_figures_and_conditions(finished: Path) -> None:
    card = (finished / "run" / "draft" / "README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    report = json.loads((finished / "run" / "evaluation" / "report.json").read_text())
    assert "eagle3" in front["tags"]
    assert f"{report['acceptance']:.3f} (" in card
    assert "3 held-out prompts, greedy, up to 12 tokens" in card
    assert str(finished) not in card, "folders of this machine are nobody's business"


def test_a_push_uploads_the_draft_and_nothing_else(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    calls: list[tuple[str, dict[str, Any]]] = []

    class Hub:
        def create_repo(self, name: str, **named: Any) -> None:
            calls.append((name, named))

        def upload_folder(self, **named: Any) -> SimpleNamespace:
            calls.append((named["repo_id"], named))
            return SimpleNamespace()

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    dry = eyas("export", "-c", finished / "run.yaml", "--push", "me/draft", "--dry-run")
    assert (dry.code, calls) == (0, [])
    assert "push: model.safetensors (" in dry.err
    assert "nothing uploaded to me/draft" in dry.err
    screen = eyas("export", "-c", finished / "run.yaml", "--push", "me/draft", "--private")
    assert screen.code == 0, screen.err
    assert calls[0] == ("me/draft", {"private": True, "exist_ok": True})
    assert calls[1][1]["allow_patterns"] == ["README.md", "config.json", "model.safetensors"]


def test_a_hub_that_refuses_is_said_with_the_way_in(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    def refuse(*arguments: Any, **named: Any) -> None:
        raise HfHubHTTPError("no", response=SimpleNamespace(status_code=401, headers={}, request=None))  # type: ignore[arg-type]

    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: SimpleNamespace(create_repo=refuse))
    screen = eyas("export", "-c", finished / "run.yaml", "--push", "me/draft")
    assert screen.code == 2
    assert "hint: log in with: hf auth login" in screen.err


def plan_of(*arguments: str | Path) -> dict[str, Any]:
    screen: Screen = eyas("plan", *arguments, "--json")
    assert screen.code == 0, screen.err
    found: dict[str, Any] = json.loads(screen.out)
    return found


def test_a_plan_of_a_finished_run_has_nothing_to_do(finished: Path) -> None:
    found = plan_of("-c", finished / "run.yaml")
    assert {s["state"] for s in found["stages"]} == {"done"}
    assert found["seconds"] == 0
    assert found["tokens"]["exact"]


def test_a_plan_reads_rates_of_a_run_beside_it(finished: Path) -> None:
    found = plan_of("-c", finished / "run.yaml", f"run_dir={finished / 'third'}", "--no-calibrate")
    bases = {s["stage"]: s["basis"] for s in found["stages"]}
    assert all(" in " in bases[s] for s in ("prepare", "extract", "train", "evaluate")), bases
    took = json.loads((finished / "run" / "states" / "stage.json").read_text())["seconds"]
    estimated = next(s["seconds"] for s in found["stages"] if s["stage"] == "extract")
    assert estimated == pytest.approx(took, rel=0.9)  # tokens are a guess before they are counted


def test_a_calibrated_plan_comes_true(finished: Path, tmp_path: Path, tiny_target: Path) -> None:
    """Tokens and bytes within 25 %; time within a factor of three on a machine that does other things too."""
    run_file = write_run(tmp_path, tiny_target)
    found = plan_of("-c", run_file)
    counts = json.loads((finished / "run" / "regenerated" / "stage.json").read_text())["counts"]
    tokens = counts["train_tokens"] + counts["held_out_tokens"]
    assert found["tokens"]["train"] + found["tokens"]["held_out"] == pytest.approx(tokens, rel=0.25)
    states = json.loads((finished / "run" / "states" / "stage.json").read_text())["num_bytes"]
    assert found["disk"][0]["bytes"] == pytest.approx(states, rel=0.25)
    draft = (finished / "run" / "draft" / "model.safetensors").stat().st_size
    assert next(n["bytes"] for n in found["disk"] if "export" in n["what"]) == pytest.approx(draft, rel=0.25)
    records = [json.loads(p.read_text()) for p in (finished / "run").glob("*/stage.json")]
    took = sum(r["seconds"] for r in records)

    def comes_true(seconds: float) -> bool:
        return took / 3 < seconds < took * 3

    # What else the machine does passes; a wrong estimate stays wrong.
    assert comes_true(found["seconds"]) or comes_true(plan_of("-c", run_file)["seconds"])
    assert not (tmp_path / "run").exists()
    assert not list(tmp_path.glob("eyas-plan-*"))


def test_a_detached_run_is_seen_and_stopped(
    tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_file = write_run(tmp_path, tiny_target)
    # The process that is started imports the same eyas.
    source = str(Path(eyas_package.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")])))
    screen = eyas("run", "-c", run_file, "--detach", "train.num_epochs=400", "train.save_every=5")
    assert screen.code == 0, screen.err

    def trains() -> bool:
        status = json.loads(eyas("status", "-c", run_file, "--json").out)
        assert status["state"] in ("never run", "running"), eyas("logs", "-c", run_file).out
        progress = status["progress"] or {"label": "", "done": 0}
        return bool(progress["label"] == "train" and progress["done"] > 5)

    wait_until(trains, every_s=0.1)
    assert eyas("run", "-c", run_file).code == 2, "two processes never work on one run"
    assert eyas("stop", "-c", run_file).code == 0
    found = json.loads(eyas("status", "-c", run_file, "--json").out)
    assert (found["state"], found["stages"]["train"]["state"]) == ("stopped", "begun")
    assert found["stages"]["train"]["seconds"] > 0
    assert "interrupted; the same command goes on" in eyas("logs", "-c", run_file, "--follow").out
