import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.drafters.eagle3.ttt_rows import RowPlan, plan_rows


def brute_force(supervised: list[bool], documents: list[int], num_steps: int) -> RowPlan:
    """FIELD's definition, row by row: row i runs at step k when every position i+1 .. i+1+k of its
    document is supervised."""
    num = len(supervised)

    def runs(i: int, k: int) -> bool:
        positions = range(i + 1, i + 2 + k)
        return all(p < num and documents[p] == documents[i] and supervised[p] for p in positions)

    keys = [i for i in range(num - 1) if documents[i] == documents[i + 1]]
    rows = [[i for i in range(num) if runs(i, k)] for k in range(num_steps)]
    teachers = [p for p in range(num) if supervised[p]]
    return RowPlan(
        keys=torch.tensor(keys, dtype=torch.long),
        rows=tuple(torch.tensor(r, dtype=torch.long) for r in rows),
        keep=tuple(
            torch.tensor([rows[k - 1].index(i) for i in rows[k]] if k else [], dtype=torch.long)
            for k in range(num_steps)
        ),
        key_places=tuple(torch.tensor([keys.index(i) for i in r], dtype=torch.long) for r in rows),
        teacher=tuple(
            torch.tensor([teachers.index(i + 1 + k) for i in r], dtype=torch.long) for k, r in enumerate(rows)
        ),
    )


def assert_equal(found: RowPlan, wanted: RowPlan) -> None:
    assert torch.equal(found.keys, wanted.keys)
    for name in ("rows", "keep", "key_places", "teacher"):
        for k, (a, b) in enumerate(zip(getattr(found, name), getattr(wanted, name), strict=True)):
            assert torch.equal(a, b), f"{name}[{k}]"


@given(
    st.lists(st.lists(st.booleans(), min_size=1, max_size=12), min_size=1, max_size=5),
    st.integers(min_value=1, max_value=6),
)
@settings(max_examples=300)
def test_the_plan_is_the_definition(masks: list[list[bool]], num_steps: int) -> None:
    supervised = [bit for mask in masks for bit in mask]
    documents = [d for d, mask in enumerate(masks) for _ in mask]
    found = plan_rows(torch.tensor(supervised), torch.tensor(documents), num_steps)
    assert_equal(found, brute_force(supervised, documents, num_steps))


def test_the_first_draft_row_after_prefill_is_supervised() -> None:
    # Tokens 3, 4, 5 are the assistant's; positions 3 and 4 have a teacher. Row 2 reads the first of them.
    plan = plan_rows(torch.tensor([False, False, False, True, True, False]), torch.zeros(6).long(), 3)
    assert [r.tolist() for r in plan.rows] == [[2, 3], [2], []]
    assert [t.tolist() for t in plan.teacher] == [[0, 1], [1], []]


def test_documents_side_by_side_plan_as_they_do_alone() -> None:
    masks = [[False, True, True, True], [True, True], [False, True, True]]
    alone = [plan_rows(torch.tensor(m), torch.zeros(len(m)).long(), 3) for m in masks]
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor([len(m) for m in masks]))
    together = plan_rows(torch.tensor([bit for mask in masks for bit in mask]), documents, 3)
    starts = [0, 4, 6]
    for k in range(3):
        assert together.rows[k].tolist() == [
            r + start for plan, start in zip(alone, starts, strict=True) for r in plan.rows[k].tolist()
        ]


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_a_plan_without_rows_is_empty_not_an_error(num_tokens: int) -> None:
    plan = plan_rows(torch.zeros(num_tokens, dtype=torch.bool), torch.zeros(num_tokens).long(), 4)
    assert [len(r) for r in plan.rows] == [0] * 4
