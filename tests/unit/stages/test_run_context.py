"""What a stage records, and when it runs again."""

from pathlib import Path
from typing import Any

import pytest

from eyas.config.load import load_config
from eyas.errors import EyasError, UserError
from eyas.stages.run_context import RunContext, begin, facts_of, finish


@pytest.fixture
def context(tmp_path: Path) -> RunContext:
    settings = (f"run_dir={tmp_path / 'run'}", "target.model=m", "data.sources=[a]")
    return RunContext(load_config(None, settings))


def do(context: RunContext, inputs: dict[str, Any], **facts: Any) -> bool:
    """Run a stage that writes one file; return whether it had work to do."""
    if not begin(context, "extract", inputs):
        return False
    (context.folder("extract") / "file").write_text("work")
    finish(context, "extract", inputs, **facts)
    return True


def test_a_stage_done_from_the_same_inputs_is_left_alone(context: RunContext) -> None:
    assert do(context, {"a": 1}, size=3)
    assert not do(context, {"a": 1})
    assert facts_of(context, "extract")["size"] == 3


def test_an_interrupted_stage_goes_on_in_its_folder(context: RunContext) -> None:
    assert begin(context, "extract", {"a": 1})
    (context.folder("extract") / "half").write_text("x")
    assert begin(context, "extract", {"a": 1})
    assert (context.folder("extract") / "half").is_file()


def test_tuples_and_lists_are_the_same_inputs(context: RunContext) -> None:
    assert do(context, {"ids": (1, 2)})
    assert not do(context, {"ids": [1, 2]})


@pytest.mark.parametrize("now", [{"a": {"b": 2}}, {"a": {"b": 1, "c": 0}}, {}])
def test_other_inputs_are_refused_with_the_first_that_differs(
    context: RunContext, now: dict[str, Any]
) -> None:
    do(context, {"a": {"b": 1}})
    with pytest.raises(UserError, match=r"is stale: a\.[bc] was "):
        begin(context, "extract", now)
    assert (context.folder("extract") / "file").is_file()


def test_other_inputs_of_an_unfinished_stage_are_refused_too(context: RunContext) -> None:
    begin(context, "extract", {"a": 1})
    with pytest.raises(UserError, match="is stale: a was 1 and is 2"):
        begin(context, "extract", {"a": 2})


def test_fresh_starts_over_in_an_empty_folder(context: RunContext) -> None:
    do(context, {"a": 1})
    context.fresh = frozenset(["extract"])
    assert begin(context, "extract", {"a": 2})
    assert not (context.folder("extract") / "file").exists()
    assert (context.config.run_dir / "states" / "file").exists(), (
        "the old output stays until there is a new one"
    )


def test_a_stage_that_has_lost_a_part_goes_on(context: RunContext) -> None:
    do(context, {"a": 1})
    assert begin(context, "extract", {"a": 1}, is_whole=lambda: False)
    assert not facts_of(context, "extract")["done"]


def test_the_output_of_a_stage_that_is_not_done_cannot_be_used(context: RunContext) -> None:
    with pytest.raises(UserError, match="has not finished"):
        context.output_of("extract")
    begin(context, "extract", {"a": 1})
    with pytest.raises(UserError, match="has not finished"):
        context.output_of("extract")
    finish(context, "extract", "x")
    assert len(context.output_of("extract")) == 16


@pytest.mark.parametrize("text", ["{", "[]", '{"inputs": {}}'])
def test_a_damaged_record_is_an_error_that_says_how_to_go_on(context: RunContext, text: str) -> None:
    do(context, {"a": 1})
    (context.folder("extract") / "stage.json").write_text(text)
    with pytest.raises(EyasError, match="is damaged") as caught:
        begin(context, "extract", {"a": 1})
    assert "--fresh" in str(caught.value.hint)


def test_fresh_mends_a_damaged_record(context: RunContext) -> None:
    do(context, {"a": 1})
    (context.folder("extract") / "stage.json").write_text("{")
    context.fresh = frozenset(["extract"])
    assert do(context, {"a": 1})


def test_the_resolved_configuration_is_beside_the_work(context: RunContext) -> None:
    do(context, {"a": 1})
    written = (context.config.run_dir / "run.yaml").read_text()
    assert 'run_dir: "."' in written
    read = load_config(context.config.run_dir / "run.yaml").config
    assert read.run_dir == context.config.run_dir
    assert [Path(path).resolve() for path, _ in read.data.weighted_sources] == [
        Path(path).resolve() for path, _ in context.config.data.weighted_sources
    ]
    assert read.model_copy(update={"data": None}) == context.config.model_copy(update={"data": None})
