"""Whether a stage is current, and why not, from records alone."""

from typing import Any

import pytest

from eyas.provenance import difference, settings_as_made, settings_before, stage_states


def record(output: str | None, before: dict[str, Any] | None = None, **inputs: Any) -> dict[str, Any]:
    """Return a record; without an output it is not finished."""
    facts = {"done": output is not None, "before": before or {}, "inputs": inputs}
    return facts if output is None else facts | {"output": output}


def chain(**changed: Any) -> dict[str, Any]:
    records: dict[str, Any] = {
        "prepare": record("p", data={"max_length": 96}, seed=0),
        "regenerate": record("r", prepared="p"),
        "extract": record("x", samples="r"),
        "train": record("t", states="x", train={"num_epochs": 1}),
        "export": record("d", checkpoint="t"),
        "evaluate": record("e", draft="d", states="x"),
    }
    records["export"]["before"] = settings_before("export", records)
    return records | changed


def test_a_whole_chain_is_current() -> None:
    assert {state.state for state in stage_states(chain()).values()} == {"done"}


def test_what_was_made_from_an_output_that_was_made_again_names_the_setting() -> None:
    found = stage_states(chain(train=record("t2", states="x", train={"num_epochs": 2})))
    assert found["train"].state == "done"
    assert found["export"].cause == "train was done again: train.num_epochs was 1 and is 2"
    assert found["evaluate"].cause == "export is stale"


@pytest.mark.parametrize(
    ("changed", "cause"),
    [(record(None, samples="r"), "extract is not finished"), (None, None)],
)
def test_an_output_whose_source_is_not_finished_is_stale_but_one_that_was_deleted_is_not_missed(
    changed: Any, cause: str | None
) -> None:
    found = stage_states(chain(extract=changed))
    assert found["train"].cause == cause


def test_other_settings_make_a_stage_stale() -> None:
    settings = {"data": {"max_length": 96}, "train": {"num_epochs": 3}, "seed": 0}
    assert stage_states(chain(), settings)["train"].cause == "train.num_epochs was 1 and is 3"
    assert stage_states(chain(), settings | {"seed": 1})["prepare"].cause == "seed was 0 and is 1"


def test_a_difference_is_said_in_words_and_never_as_fingerprints() -> None:
    words = difference("prepare", {"sources": ["0123"], "seed": 0}, {"sources": ["4567"], "seed": 0}, {})
    assert words == "the files of data.sources changed"
    words = difference("regenerate", {"max_length": 9}, {"max_length": 8}, {})
    assert words == "data.max_length was 9 and is 8"


def test_settings_are_shown_as_a_stage_was_made_with() -> None:
    settings, changed = settings_as_made({"train": {"num_epochs": 3, "device": "cpu"}}, chain(), ["train"])
    assert settings == {"train": {"num_epochs": 1, "device": "cpu"}}
    assert changed == ["train.num_epochs"]
