from pathlib import Path

import pytest

from eyas.config.load import load_config
from eyas.findings import Finding
from eyas.stages.doctor import examine, print_findings
from pipeline import eyas, write_run


def states(findings: list[Finding]) -> dict[str, str]:
    return {f.subject: f.state for f in findings}


def test_a_run_that_can_start_has_no_problem(tmp_path: Path, tiny_target: Path) -> None:
    found = examine(load_config(write_run(tmp_path, tiny_target)))
    assert "problem" not in states(found).values(), [f for f in found if f.state == "problem"]
    assert states(found)["target"] == states(found)["template"] == states(found)["settings"] == "ok"
    assert {"python", "torch", "vllm", "memory", "disk", "run folder"} <= set(states(found))


def test_every_finding_that_is_a_problem_has_a_remedy(tmp_path: Path, tiny_target: Path) -> None:
    run_file = write_run(tmp_path, tiny_target)
    for settings in (
        ("target.model=./nowhere",),
        ("extract.engine=vlm",),
        ("target.aux_layer_ids=[0,1]",),
        ("regenerate.endpoint=http://127.0.0.1:9/v1",),
        ("train.device=cuda",),
        ("train.trackers=[nowhere_installed]",),
    ):
        problems = [f for f in examine(load_config(run_file, settings)) if f.state == "problem"]
        assert problems, settings
        assert all(f.remedy for f in problems)


def test_a_folder_that_cannot_be_written_is_a_problem(tmp_path: Path, tiny_target: Path) -> None:
    (tmp_path / "file").write_text("")
    loaded = load_config(write_run(tmp_path, tiny_target), (f"run_dir={tmp_path / 'file' / 'run'}",))
    assert states(examine(loaded))["run folder"] == "problem"


def test_lines_say_the_state_first_and_the_count_last(capsys: pytest.CaptureFixture[str]) -> None:
    print_findings([Finding("disk", "ok", "free"), Finding("gpu", "problem", "none", "buy one")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["ok", "disk", "free"]
    assert lines[1].split()[0] == "problem"
    assert lines[2].strip() == "buy one"
    assert lines[-1] == "1 problems, 0 warnings"


def test_the_exit_code_tells_programs(tmp_path: Path, tiny_target: Path) -> None:
    import json

    run_file = write_run(tmp_path, tiny_target)
    good = eyas("doctor", "-c", run_file, "--json")
    assert good.code == 0, good.out
    assert {"subject", "state", "text", "remedy"} == set(json.loads(good.out)[0])
    assert eyas("doctor", "-c", run_file, "target.model=./nowhere").code == 1
