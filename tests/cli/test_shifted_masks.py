"""A loss mask that comes with token ids and is shifted by one: nothing can be sure of it, so it is told."""

from pathlib import Path
from typing import Any

import pytest

from eyas.targets.tokenizer import read_tokenizer
from pipeline import eyas, write_jsonl, write_run

SHIFTS = {-1: "before", 1: "behind"}


def rows(target: Path, shift: int) -> list[dict[str, Any]]:
    """Two turns each, whose mask is right but for the shift."""
    end = read_tokenizer(target).eos_token_id
    ids = [5, 6, 7, end, 8, 9, 10, 11, end, 12, 13, 14, end, 15, 16, 17, end, 18]
    mask = [0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1, 0]
    moved = mask[-shift:] + mask[:-shift]
    return [{"id": f"r{i}", "input_ids": [*ids, 20 + i], "loss_mask": [*moved, 0]} for i in range(12)]


@pytest.mark.parametrize("shift", [-1, 0, 1])
def test_a_mask_shifted_by_one_is_told_with_figures(tiny_target: Path, tmp_path: Path, shift: int) -> None:
    data = write_jsonl(tmp_path / "rows.jsonl", rows(tiny_target, shift))
    run_file = write_run(tmp_path, tiny_target, regenerate={"enabled": False})
    screen = eyas("extract", "-c", run_file, f"extract.prepared_data={data}")
    assert screen.code == 0, screen.err
    told = [line for line in screen.err.splitlines() if "may be shifted by one" in line]
    if shift:
        where = SHIFTS[shift]
        assert told == [
            f"  warning: 24 of 24 masked spans end one token {where} the end of their turn, 0 at it: "
            "the loss_mask may be shifted by one"
        ]
    else:
        assert told == []


@pytest.mark.parametrize("shift", [-1, 0, 1])
def test_prepare_counts_such_masks(tiny_target: Path, tmp_path: Path, shift: int) -> None:
    run_file = write_run(tmp_path, tiny_target, regenerate={"enabled": False})
    write_jsonl(tmp_path / "prompts.jsonl", rows(tiny_target, shift))
    screen = eyas("prepare", "-c", run_file)
    assert screen.code == 0, screen.err
    line = f"warning: mask_ends_one_token_{SHIFTS.get(shift)}_end_of_turn in 12 conversations"
    assert (line in screen.err) == bool(shift)
