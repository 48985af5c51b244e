"""Thirty ways to get it wrong, each with the whole screen it shows; exit code 2, and nothing is written."""

from pathlib import Path

import pytest

from pipeline import eyas, snapshot, write_run

KEYS = "eyas config --keys"
LISTS = "eyas config --keys lists every setting"
EXPLAINS = "eyas config --keys explains it"
RUN = ("run", "-c", "run.yaml")


def usage(command: str, what: str) -> str:
    return error(what, f"eyas {command} --help".replace("  ", " "))


def error(what: str, hint: str) -> str:
    return f"error: {what}\nhint: {hint}\n"


CASES: list[tuple[tuple[str, ...], str]] = [
    (("trian",), usage("", "unknown command 'trian'; did you mean 'train'?")),
    (("frobnicate",), usage("", "unknown command 'frobnicate'")),
    (("run", "--frsh"), usage("run", "no such option '--frsh'. (Did you mean one of: '--fresh', '--from'?)")),
    (("run", "-c"), usage("", "option '-c' requires an argument")),
    (("extract", "--tp-size", "two"),
     usage("extract", "invalid value for '--tp-size': 'two' is not a valid integer")),
    (("logs", "-n", "-1"), usage("logs", "invalid value for '-n' / '--lines': -1 is not in the range x>=0")),
    (("compare",), usage("compare", "missing argument 'RUN RUN...'")),
    (("inspect", "prepard"), usage("inspect", "unknown command 'prepard'; did you mean 'prepared'?")),
    (("completion", "tcsh"),
     usage("completion", "invalid value for '{bash|zsh|fish}': 'tcsh' is not one of 'bash', 'zsh', 'fish'")),
    (("run", "target.model=m"),
     error("the setting 'run_dir' is missing", "set run_dir=... or write it in the run file")),
    (("run", "-c", "nowhere.yaml"),
     error("cannot read the run file nowhere.yaml: No such file or directory",
           "name one with -c, for example -c recipes/smollm2-cpu.yaml")),
    ((*RUN, "train"), error("cannot read 'train'", "write section.key=value, e.g. train.num_epochs=2")),
    ((*RUN, "=3"), error("cannot read '=3'", "write section.key=value, e.g. train.num_epochs=2")),
    ((*RUN, "train.num_epochs=[1"),
     error("cannot read the value of 'train.num_epochs=[1'", "write it as in YAML; quote it for the shell")),
    ((*RUN, "train.epochs=1"),
     error("unknown setting 'train.epochs'; did you mean 'train.num_epochs'?", LISTS)),
    ((*RUN, "num_epochs=1"),
     error("unknown setting 'num_epochs'; did you mean 'train.num_epochs'?", LISTS)),
    ((*RUN, "train.num_epochs=0"),
     error("train.num_epochs: Input should be greater than 0 (got 0)", EXPLAINS)),
    ((*RUN, "train.num_epochs=many"),
     error("train.num_epochs: Input should be a valid integer, unable to parse string as an integer "
           "(got 'many')", EXPLAINS)),
    ((*RUN, "draft.loss=mse"),
     error("draft.loss: Input should be 'kl', 'lk' or 'hybrid' (got 'mse')", EXPLAINS)),
    ((*RUN, "extract.engine=vlm"),
     error("unknown engine 'vlm'; did you mean 'vllm'?", "known: fake, sglang, transformers, vllm")),
    ((*RUN, "train.trackers=[tensorbord]"),
     error("unknown tracker 'tensorbord'; did you mean 'tensorboard'?",
           "known: mlflow, tensorboard, trackio, wandb")),
    ((*RUN, "target.model=./nowhere"),
     error("there is no model folder ./nowhere",
           "set target.model to a local folder, a hub id owner/name, or demo:smollm2-135m-instruct")),
    ((*RUN, "target.model=demo:smollm"),
     error("unknown demo target 'smollm'", "known: demo:smollm2-135m-instruct")),
    (("status", "-c", "run.yaml"),
     error("there is no run in run", "start it: eyas run -c <run file>")),
    (("logs", "-c", "run.yaml"), error("run has no log", "logs are written by: eyas run --detach")),
    (("stop", "-c", "run.yaml"), error("nothing works on run here", "see: eyas status")),
    (("compare", "run"),
     error("run is not a run folder", "name folders that hold a run.yaml")),
    (("export", "-c", "run.yaml", "--push", "me"),
     error("--push me: not a repository", "as in --push owner/name")),
    (("plan", "-c", "run.yaml", "--rate", "extrct=5"),
     error("--rate extrct=5: no stage 'extrct' has a rate; did you mean 'extract'?",
           "known: prepare, regenerate, extract, train, evaluate; as in --rate extract=2280")),
    (("plan", "-c", "run.yaml", "--rate", "extract=fast"),
     error("--rate extract=fast: 'fast' is no rate", "as in --rate extract=2280")),
    (("plan", "-c", "run.yaml", "data.sources=[-]"),
     error("a plan cannot read standard input and leave it for the run", "give --tokens NUMBER")),
    (("init", "--data", "x.jsonl", "-o", "new.yaml"),
     error("--target is missing, and there is no terminal to ask on", "give --target")),
    (("init", "--target", "m", "--data", "x", "--gpus", "0", "-o", "run.yaml"),
     error("run.yaml is there already", "name another file with -o")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "screen"), CASES, ids=lambda v: " ".join(v) if isinstance(v, tuple) else ""
)
def test_the_whole_screen_of_a_wrong_invocation(
    arguments: tuple[str, ...],
    screen: str,
    tmp_path: Path,
    tiny_target: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_run(tmp_path, tiny_target, run_dir="run")
    monkeypatch.chdir(tmp_path)
    before = snapshot(tmp_path)
    found = eyas(*arguments)
    assert (found.err, found.out, found.code) == (screen, "", 2)
    assert snapshot(tmp_path) == before


def test_there_are_thirty() -> None:
    assert len(CASES) >= 30
