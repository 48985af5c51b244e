"""Several ranks train what one process trains."""

import functools
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eyas.config.schema import TrainSettings
from eyas.data.pack import pack
from eyas.errors import ContractError, EyasError, UserError
from eyas.train.launch import launch_ranks
from eyas.train.rank_errors import RankLeft, report_first_failure
from eyas.train.ranks import Ranks, check_shared, shares_of
from eyas.train.step_plan import check_ranks, plan_steps
from rank_cases import run_ranks, train_together


def differs(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the largest difference of a weight."""
    return max(float((one["weights"][n] - other["weights"][n]).abs().max()) for n in one["weights"])


@pytest.mark.parametrize("written_out", [False, True], ids=["autograd", "written-out"])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_train_what_one_process_trains_on_the_same_global_batches(
    tmp_path: Path, size: int, written_out: bool
) -> None:
    alone = train_together(Ranks(), tmp_path / "alone", written_out, None)
    together = run_ranks(size, tmp_path / "meet", train_together, tmp_path / "together", written_out, None)
    for result in together:
        assert differs(result, alone) < 1e-5
        assert differs(result, together[0]) == 0
        assert result["num_batches"] == alone["num_batches"]
        for row, expected in zip(result["history"], alone["history"], strict=True):
            assert row["loss"] == pytest.approx(expected["loss"], rel=1e-5)
            assert row.get("grad_norm", 0) == pytest.approx(expected.get("grad_norm", 0), rel=1e-4)
            assert row.get("acceptance_length") == expected.get("acceptance_length")
    # A step that is not full leaves some ranks with nothing to compute, and none behind.
    shares = np.array([result["shares"] for result in together])
    assert (shares.max(0) - shares.min(0) <= 1).all()
    assert shares.sum() == sum(alone["shares"])


def test_ranks_train_by_muon_what_one_process_trains(tmp_path: Path) -> None:
    alone = train_together(Ranks(), tmp_path / "alone", True, None, optimizer="muon")
    train = functools.partial(train_together, optimizer="muon")
    together = run_ranks(2, tmp_path / "meet", train, tmp_path / "together", True, None)
    assert differs(together[1], together[0]) == 0
    assert differs(together[0], alone) < 1e-4  # its products are of bfloat16, its steps of 1e-3


def test_another_number_of_ranks_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    alone = train_together(Ranks(), tmp_path / "alone", False, None)
    root = tmp_path / "run"
    run_ranks(4, tmp_path / "four", train_together, root, False, 3)
    run_ranks(2, tmp_path / "two", train_together, root, False, 2)
    last = train_together(Ranks(), root, False, None)
    assert differs(last, alone) < 1e-5
    taken = [row["step"] for row in last["history"] if "grad_norm" in row]
    assert taken == list(range(1, last["num_batches"] + 1))


def test_ranks_skip_the_same_step_and_name_all_its_samples(tmp_path: Path) -> None:
    results = run_ranks(2, tmp_path / "meet", train_together, tmp_path / "run", True, None, (5,))
    skipped = [[row for row in r["history"] if row.get("taken") is False] for r in results]
    assert skipped[0] == skipped[1]
    assert len(skipped[0]) == 2  # once an epoch
    assert all("s5" in row["sample_ids"] for row in skipped[0])
    assert differs(results[0], results[1]) == 0
    assert all(torch.isfinite(w).all() for w in results[0]["weights"].values())


def unequal(ranks: Ranks) -> str:
    try:
        ranks.check_same("versions", ranks.rank > 0, hint="the same everywhere")
    except ContractError as error:
        return error.what
    return ""


def fail_on_first(ranks: Ranks) -> Any:
    def work() -> None:
        raise UserError("the disk is full")

    try:
        ranks.on_first(work)
    except UserError as error:
        return error.what
    except SystemExit as error:
        return error.code


def fail_in_turn(ranks: Ranks, first: int) -> Any:
    """Fail on every rank: on one for a reason, on the others because a sum broke under them or as well."""
    try:
        with report_first_failure(ranks):
            if ranks.rank == first:
                raise UserError("the disk is full")
            if ranks.rank == 2:
                raise RankLeft
            time.sleep(1.0)
            raise ContractError("another error, which came later")
    except UserError as error:
        return error.what
    except SystemExit as error:
        return error.code


def test_of_ranks_that_fail_the_first_says_why_and_the_others_leave_with_its_code(tmp_path: Path) -> None:
    assert run_ranks(3, tmp_path / "zero", fail_in_turn, 0) == ["the disk is full", 2, 2]
    assert run_ranks(3, tmp_path / "one", fail_in_turn, 1) == [2, "the disk is full", 2]


def test_a_rank_that_was_killed_is_told_by_the_command_that_started_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "rank"
    program.write_text("#!/bin/sh\nif [ $RANK = 1 ]; then kill -9 $$; fi\nexec sleep 20\n")
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    with pytest.raises(EyasError, match="rank 1 was killed by SIGKILL"):
        launch_ranks(2, ())


def look(ranks: Ranks, seen: Path, unseen: Path) -> str:
    """Look for the run folder where each rank's machine has it: rank 1's lacks it."""
    try:
        check_shared(ranks, unseen if ranks.rank else seen)
    except UserError as error:
        return error.what
    return ""


def test_a_run_folder_that_one_machine_does_not_see_is_named_on_all(tmp_path: Path) -> None:
    (tmp_path / "seen").mkdir()
    (tmp_path / "seen" / "stage.json").touch()
    found = run_ranks(2, tmp_path / "meet", look, tmp_path / "seen", tmp_path / "unseen")
    assert all("does not see" in what for what in found)
    assert run_ranks(2, tmp_path / "again", look, tmp_path / "seen", tmp_path / "seen") == ["", ""]


def test_ranks_refuse_to_differ_and_an_error_of_the_first_ends_all(tmp_path: Path) -> None:
    found = run_ranks(2, tmp_path / "differ", unequal)
    assert found[0] == found[1]
    assert found[0].startswith("versions: False on rank 0")
    assert run_ranks(2, tmp_path / "fail", fail_on_first) == ["the disk is full", 2]


def test_a_step_that_the_gpus_cannot_share_equally_is_refused_with_the_number_that_fits() -> None:
    check_ranks(TrainSettings(batches_per_step=4), 2)
    with pytest.raises(UserError) as caught:
        check_ranks(TrainSettings(batches_per_step=6), 4)
    assert "train.batches_per_step=8" in str(caught.value.hint)


def test_the_batches_of_a_step_cost_about_the_same_and_each_sample_comes_once_an_epoch() -> None:
    generator = np.random.default_rng(0)
    lengths = generator.integers(50, 1000, 4000)
    costs = lengths * generator.beta(2, 2, 4000)
    settings = TrainSettings(num_epochs=1, batch_tokens=4096, batches_per_step=8)
    steps = plan_steps(lengths.tolist(), costs, settings, seed=0)
    assert sorted(i for step in steps for p in step for i in p) == list(range(4000))

    def waiting(steps: list[list[list[int]]]) -> float:
        """Return the share of their time that eight ranks wait for the slowest."""
        full = [s for s in steps if len(s) == 8]
        loads = np.array([[costs[list(p)].sum() for p in s] for s in full])
        return float(1 - loads.sum() / (loads.max(1).sum() * 8))

    groups = pack(lengths.tolist(), 4096, 0)
    as_packed = [groups[i : i + 8] for i in range(0, len(groups), 8)]
    assert waiting(steps) < 0.02
    assert waiting(as_packed) > 0.2


def test_dearer_batches_are_dealt_to_ranks_with_less_to_do() -> None:
    step = [[i] for i in range(4)]
    costs = [10.0, 1.0, 9.0, 2.0]
    shares = [shares_of(step, costs, 2)[r] for r in range(2)]
    assert shares == [[[0], [1]], [[2], [3]]]
