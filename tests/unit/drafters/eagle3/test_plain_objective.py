"""What the plain objective measures, hands over and packs; acceptance replayed from brute force."""

import pytest
import torch

from eyas.config.schema import TrainSettings
from eyas.drafters.common.acceptance import replay, replay_answers
from eyas.drafters.common.batch import PackedBatch, pack_batch
from eyas.drafters.eagle3.objective import PlainObjective, make_objective, ratios_of
from eyas.drafters.eagle3.settings import Settings
from eyas.drafters.eagle3.ttt_rows import RowPlan, rows_of
from reference import is_supervised, reference_logits
from train_cases import EPS, THETA, Case, make_case

CPU = torch.device("cpu")
NUM_STEPS = 4


def objective_of(case: Case, **train: bool) -> PlainObjective:
    found = make_objective(
        case.draft,
        case.teacher,
        case.target_ids,
        Settings(ttt_steps=NUM_STEPS),
        TrainSettings(**train),
        torch.float32,
        CPU,
        sharded=False,
    )
    assert isinstance(found, PlainObjective)
    return found


def batch_of(case: Case) -> PackedBatch[RowPlan]:
    return pack_batch(case.states, rows_of(NUM_STEPS), CPU, torch.float32)


def by_brute_force(case: Case) -> dict[int, tuple[int, int]]:
    """Return accepted and depth of each row that a step supervises, row by row of the whole batch."""
    weights = {n: p.detach().double() for n, p in case.draft.named_parameters()}
    config = case.draft.config
    heads = (config.num_attention_heads, config.num_key_value_heads)
    logits = reference_logits(weights, case.samples, case.aux.double(), NUM_STEPS, *heads, EPS, THETA)
    wanted = case.teacher.logits(case.last).argmax(-1)
    runs = [is_supervised(case.samples, step) for step in range(NUM_STEPS)]
    found = {}
    for row in runs[0].nonzero().flatten().tolist():
        depth = sum(bool(r[row]) for r in runs)
        right = [
            int(case.target_ids[logits[k][row].argmax()]) == int(wanted[row + 1 + k]) for k in range(depth)
        ]
        found[row] = (next((k for k, is_right in enumerate(right) if not is_right), depth), depth)
    return found


@pytest.fixture
def case() -> Case:
    """A draft that is often right: the teacher is what it says itself of many positions."""
    case = make_case(3, (24, 7, 30), share=0.7)
    with torch.no_grad():
        case.draft.lm_head.weight.copy_(case.teacher.head[case.target_ids])
    return case


def test_rows_accepted_and_depth_are_those_of_brute_force(case: Case) -> None:
    _, rounds = objective_of(case).measure(batch_of(case), 3)
    expected = by_brute_force(case)
    assert rounds.rows.tolist() == sorted(expected)
    assert [tuple(pair) for pair in zip(rounds.accepted.tolist(), rounds.depth.tolist(), strict=True)] == [
        expected[row] for row in sorted(expected)
    ]
    assert {0, 1, NUM_STEPS} <= {depth for _, depth in expected.values()} | {0}
    assert any(accepted for accepted, _ in expected.values())


def test_answers_are_replayed_apart_where_rows_break(case: Case) -> None:
    _, rounds = objective_of(case).measure(batch_of(case), 3)
    found = replay_answers(rounds.rows, rounds.accepted, rounds.depth, 3)
    expected, answer, previous = [], [], None
    rows = by_brute_force(case)
    for row in [*sorted(rows), None]:
        if answer and (row is None or row != previous + 1):
            expected.append(replay([rows[r][0] for r in answer], [rows[r][1] for r in answer], 3))
            answer = []
        if row is not None:
            answer.append(row)
        previous = row
    assert found == expected
    assert len(found) > 2


def test_measuring_makes_no_gradient_and_training_does_with_the_same_sums(case: Case) -> None:
    objective, batch = objective_of(case), batch_of(case)
    objective.start()
    sums, _ = objective.measure(batch, 3)
    assert all(p.grad is None for p in case.draft.parameters())
    assert objective.backward(batch).tolist() == pytest.approx(sums.tolist(), rel=1e-6)
    assert all(p.grad is not None for p in case.draft.trainable().values())
    assert len(sums) == objective.num_sums
    assert sums[-1] == batch.plan.num_supervised == len(batch.plan.rows[0])


def test_computing_again_gives_the_same_gradients(case: Case) -> None:
    gradients = []
    for recompute in (False, True):
        objective = objective_of(case, recompute=recompute)
        objective.start()
        objective.backward(batch_of(case))
        gradients.append([p.grad.clone() for p in case.draft.trainable().values()])  # type: ignore[union-attr]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("train_head", [True, False])
def test_gradients_of_all_that_is_trained_are_handed_over_once(case: Case, train_head: bool) -> None:
    objective, taken = objective_of(case, train_head=train_head), list[str]()
    objective.hand_over_to(lambda name, gradient: taken.append(name))
    objective.start()
    objective.backward(batch_of(case))
    assert taken == []
    objective.finish()
    frozen = set() if train_head else {"lm_head.weight"}
    assert sorted(taken) == sorted(set(case.draft.trainable()) - frozen)


def test_without_a_batch_zeros_are_handed_over(case: Case) -> None:
    objective, sums = objective_of(case), list[float]()
    objective.hand_over_to(lambda name, gradient: sums.append(float(gradient.abs().sum())))
    objective.start()
    objective.finish()
    assert sums == [0.0] * len(case.draft.trainable())


def test_a_plan_that_is_changed_keeps_its_places() -> None:
    plan = batch_of(make_case(1)).plan
    again = plan.each(lambda tensor: tensor + 0)
    assert all(torch.equal(a, b) for a, b in zip(plan.tensors(), again.tensors(), strict=True))
    assert [len(rows) for rows in again.rows] == [len(rows) for rows in plan.rows]
    assert len(plan.tensors()) == 1 + 4 * NUM_STEPS
    moved = plan.each(lambda tensor: tensor + 1)
    assert torch.equal(moved.keys, plan.keys + 1)
    assert torch.equal(moved.teacher[2], plan.teacher[2] + 1)


def test_ratios_of_one_row_and_of_none() -> None:
    assert ratios_of([3.0, 3.0, 1, 1, 1]) == {"loss": 3.0, "agreement": [1.0]}
    assert ratios_of([0.0] * 5) == {"loss": 0.0, "agreement": [0.0]}


def test_ratios_of_several_steps_are_each_their_own(case: Case) -> None:
    sums = [6.0, 1.0, 2.0, 3.0, 9, 6, 2, 12, 8, 4, 12]
    assert ratios_of(sums) == {"loss": 0.5, "agreement": [9 / 12, 6 / 8, 2 / 4]}
    assert objective_of(case).ratios(sums) == ratios_of(sums)
