"""The harness's table says what its lines do."""

from typing import Any

from harness_table import table


def line(recipe: str, seed: int, rounds: dict[str, list[int]], flags: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "recipe": recipe,
        "flags": list(flags),
        "seed": seed,
        "target": "small",
        "tokens": 1000,
        "steps": 7,
        "seconds": 60.0,
        "held_out": {"1": {"rounds": rounds}},
    }


GOOD = {"a": [10, 9], "b": [10, 8], "c": [10, 9], "d": [10, 9]}
POOR = {"a": [10, 4], "b": [10, 3], "c": [10, 4], "d": [10, 4]}


def test_the_best_recipe_is_first_and_others_are_measured_against_it() -> None:
    _, _, first, second = table([line("poor", 0, POOR), line("good", 0, GOOD)], [1]).splitlines()
    assert first.startswith("| small | good |")
    assert "1.875 (" in first
    assert first.endswith("|  |")
    assert "| small | poor |" in second
    low, high = (float(x) for x in second.split("|")[-2].split(" to "))
    assert -0.6 < low <= -0.5 <= high < -0.4


def test_seeds_are_one_row_and_other_flags_another() -> None:
    lines = [line("one", 0, GOOD), line("one", 1, POOR), line("one", 0, POOR, ("--lr", "1"))]
    rows = table(lines, [1]).splitlines()[2:]
    assert len(rows) == 2
    assert "| 2 | 1.625 (" in rows[0]
    assert "--lr 1" in rows[1]
