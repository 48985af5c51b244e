"""Tokens of a run: counted where samples are there, else as well as they can be known."""

from pathlib import Path

import pytest

from eyas.config.load import load_config
from eyas.plan.measure_rates import MeasuredRates, Rows
from eyas.plan.tokens import counted_tokens, expected_tokens, given_tokens
from eyas.run_folder import write_record

CONFIG = load_config(
    None,
    ("run_dir=r", "target.model=m", "data.sources=[a]", "data.validation_fraction=0.1", "data.max_length=100",
     "regenerate.max_new_tokens=50"),
).config  # fmt: skip
COUNTS = {
    "train_tokens": 900,
    "held_out_tokens": 100,
    "train_supervised_tokens": 450,
    "held_out_supervised_tokens": 50,
    "train_conversations": 9,
    "held_out_conversations": 1,
}


def test_samples_that_are_there_are_counted(tmp_path: Path) -> None:
    assert counted_tokens([tmp_path / "none"]) is None
    write_record(tmp_path / "begun", "prepare", {}, done=False)
    write_record(tmp_path / "done", "prepare", {}, done=True, counts=COUNTS)
    found = counted_tokens([tmp_path / "none", tmp_path / "begun", tmp_path / "done"])
    assert found is not None
    assert (found.total, found.supervised_share, found.conversations, found.exact) == (1000, 0.5, 10, True)


def test_given_tokens_are_split_as_the_data_will_be() -> None:
    found = given_tokens(CONFIG, 1000)
    assert (found.train, found.held_out, found.conversations) == (900, 100, 10)


def test_a_guess_takes_four_characters_a_token_and_answers_of_full_length() -> None:
    found = expected_tokens(CONFIG, Rows(["x" * 40] * 5, 20, exact=False), None)
    assert found.total == pytest.approx(20 * (10 + 50))
    assert found.supervised_share == pytest.approx(50 / 60)
    assert "about 20 rows" in found.basis


def test_a_measurement_is_believed_before_a_guess() -> None:
    measured = MeasuredRates(kept_share=0.5, tokens_per_conversation=30, supervised_share=0.4)
    found = expected_tokens(CONFIG, Rows(["x"] * 5, 20, exact=True), measured)
    assert (found.total, found.supervised_share, found.conversations) == (300, 0.4, 10)
    assert found.basis == "measured on 5 of 20 rows, answers on fewer"
