"""Ranks that hold slices of the masters train what ranks that hold them whole train."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eyas.train.checkpoint import latest_checkpoint
from eyas.train.ranks import Ranks
from rank_cases import run_ranks, train_together


def train(ranks: Ranks, root: Path, cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Train one case after the other, each whole and sliced; the ranks meet once for all of them."""
    results = {}
    for name, case in cases.items():
        for how in ("whole", "sliced"):
            case = {"written_out": False, "stop_after": None} | case | {"shard": how == "sliced"}
            results[f"{name} {how}"] = train_together(ranks, root / f"{name}-{how}", **case)
    return results


def differs(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the largest difference of a weight."""
    assert one["weights"].keys() == other["weights"].keys()
    return max(
        float((w.float() - other["weights"][n].float()).abs().max()) for n, w in one["weights"].items()
    )


@pytest.mark.parametrize("written_out", [False, True], ids=["autograd", "written-out"])
def test_slices_are_trained_bit_for_bit_and_each_rank_keeps_half(tmp_path: Path, written_out: bool) -> None:
    shared = {"written_out": written_out, "num_epochs": 1, "train_head": False}
    cases = {
        # Nothing is added up in another order: one micro-batch a rank, and a norm that divides nothing.
        "exact": shared | {"batches_per_step": 2, "max_grad_norm": 1e6, "ema_decay": 0.5},
        # Each of two batches a rank is added up over the ranks first, and the norm rank by rank.
        "rounded": shared | {"train_head": True},
    }
    results = run_ranks(2, tmp_path / "meet", train, tmp_path, cases)
    for result in results:
        for name in cases:
            whole, sliced = result[f"{name} whole"], result[f"{name} sliced"]
            assert differs(whole, sliced) <= (0 if name == "exact" else 1e-6)
            assert differs(sliced, results[0][f"{name} sliced"]) == 0
            assert sliced["bytes"] < 0.52 * whole["bytes"]
            for row, expected in zip(sliced["history"], whole["history"], strict=True):
                assert row["loss"] == pytest.approx(expected["loss"], rel=1e-6)
                assert row.get("grad_norm", 0) == pytest.approx(expected.get("grad_norm", 0), rel=1e-6)
                assert row.get("acceptance_length") == expected.get("acceptance_length")
    # What lies on the disk does not tell how it was trained.
    kept = [latest_checkpoint(tmp_path / f"exact-{how}") for how in ("whole", "sliced")]
    for file in ("draft.safetensors", "optimizer.safetensors"):
        whole, sliced = (load_file(folder / file) for folder in kept if folder)
        assert whole.keys() == sliced.keys()
        assert all(torch.equal(whole[n], sliced[n]) for n in whole)


def test_large_drafts_parts_and_savings_all_go_with_slices(tmp_path: Path) -> None:
    """Three ranks, so that rows do not divide, and one of them has none of the head's."""
    wide = {"target_width": 40, "num_layers": 2, "draft_vocab": 4}
    shared = {"batches_per_step": 6, "num_epochs": 1, "shape": wide}
    cases = {
        "own embedding, layers": shared | {"recompute": True},
        "bfloat16": shared | {"compute_dtype": "bfloat16"},
        "written-out": shared | {"shape": {"fc_norm": True, "draft_vocab": 4}, "written_out": True},
    }
    results = run_ranks(3, tmp_path / "meet", train, tmp_path, cases)
    for name in cases:
        whole, sliced = results[0][f"{name} whole"], results[0][f"{name} sliced"]
        # A draft that computes in bfloat16 shows weights rounded to it, and its embedding's gradients are.
        limit = 0.01 if name == "bfloat16" else 2e-6
        assert differs(whole, sliced) < limit, name
        for row, expected in zip(sliced["history"], whole["history"], strict=True):
            assert row["loss"] == pytest.approx(expected["loss"], rel=2e-3 if name == "bfloat16" else 1e-5)


def continued(ranks: Ranks, root: Path, *stops: tuple[bool, int | None]) -> dict[str, Any]:
    """Train on from what lies in ``root``, for as many steps each time, sliced or whole."""
    for shard, stop_after in stops:
        settings = {"shard": shard, "ema_decay": 0.9, "num_epochs": 1, "batches_per_step": 2}
        result = train_together(ranks, root, False, stop_after, **settings)
    return result


def interrupted_or_not(ranks: Ranks, root: Path) -> list[dict[str, Any]]:
    whole = continued(ranks, root / "whole", (True, None))
    return [whole, continued(ranks, root / "halted", (True, 3), (True, None))]


def test_whole_and_sliced_ranks_and_one_process_go_on_from_each_others_checkpoints(tmp_path: Path) -> None:
    (through, halted), _ = run_ranks(2, tmp_path / "meet", interrupted_or_not, tmp_path)
    assert differs(through, halted) == 0
    assert through["history"] == halted["history"]
    root = tmp_path / "run"
    run_ranks(2, tmp_path / "two", continued, root, (True, 2), (False, 1))
    continued(Ranks(), root, (True, 1))  # one process has nobody to share with
    one, _ = run_ranks(2, tmp_path / "again", continued, root, (True, None))
    assert differs(one, through) < 1e-5
    taken = [row["step"] for row in one["history"] if "grad_norm" in row]
    assert taken == list(range(1, one["num_batches"] + 1))


def poisoned(ranks: Ranks, root: Path, written_out: bool) -> dict[str, Any]:
    return train_together(ranks, root, written_out, None, (5,), shard=True)


@pytest.mark.parametrize("written_out", [False, True], ids=["autograd", "written-out"])
def test_slices_skip_a_step_that_is_not_finite_on_all_ranks(tmp_path: Path, written_out: bool) -> None:
    results = run_ranks(2, tmp_path / "meet", poisoned, tmp_path / "run", written_out)
    skipped = [[row for row in r["history"] if row.get("taken") is False] for r in results]
    assert skipped[0] == skipped[1]
    assert len(skipped[0]) == 2  # once an epoch
    assert differs(results[0], results[1]) == 0
    assert all(torch.isfinite(w).all() for w in results[0]["weights"].values())
