"""Replies of worker processes: exactly one a rank, of the type asked for, or an error that says who."""

from typing import Any

import pytest

from eyas.engines.vllm.rpc import call_all_ranks
from eyas.engines.vllm.worker import EyasWorker
from eyas.errors import ContractError, EyasError


class Rank(EyasWorker):
    def __init__(self, rank: int, answer: Any) -> None:
        self.rank, self.answer = rank, answer

    def eyas_ask(self, plus: int = 0) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer + plus if plus else self.answer


class Ranks:
    """Calls workers as vLLM's executors do; ``spoil`` changes the list of replies."""

    def __init__(self, *answers: Any, spoil: Any = None) -> None:
        self.workers = [Rank(rank, answer) for rank, answer in enumerate(answers)]
        self.spoil = spoil or (lambda replies: replies)

    def collective_rpc(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()) -> Any:
        return self.spoil([getattr(worker, method)(*args) for worker in self.workers])


def test_all_ranks_answer_in_rank_order() -> None:
    assert call_all_ranks(Ranks(5, 6, 7), 3, int, "ask", 10) == [15, 16, 17]
    assert call_all_ranks(Ranks(5, 6, 7, spoil=lambda r: r[::-1]), 3, int, "ask") == [5, 6, 7]


def test_a_list_that_one_rank_holds_is_never_taken_for_the_list_of_ranks() -> None:
    # The trap: an executor that returns rank 0's value itself, here a list with one entry a layer.
    with pytest.raises(ContractError, match="3 replies from 2 ranks"):
        call_all_ranks(Ranks(1, 2, spoil=lambda r: ["layer 0", "layer 1", "layer 2"]), 2, int, "ask")
    with pytest.raises(ContractError, match="which no eyas worker sends"):
        call_all_ranks(Ranks(1, 2, spoil=lambda r: ["layer 0", "layer 1"]), 2, int, "ask")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda r: r[0], "returned a dict instead of one reply a rank"),
        (lambda r: r[:1], "1 replies from 2 ranks"),
        (lambda r: [r[0], r[0]], r"replies came from ranks \[0, 0\]"),
        (lambda r: [r[0], None], "reply 1 is None"),
    ],
)
def test_replies_of_a_wrong_count_or_shape_are_refused(spoil: Any, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        call_all_ranks(Ranks(1, 2, spoil=spoil), 2, int, "ask")


def test_a_reply_of_another_type_names_the_rank_that_sent_it() -> None:
    with pytest.raises(ContractError, match="rank 1 answered 'two', expected int"):
        call_all_ranks(Ranks(1, "two"), 2, int, "ask")


def test_a_failure_names_its_rank() -> None:
    with pytest.raises(EyasError, match="ask failed on rank 1: ValueError: disk full"):
        call_all_ranks(Ranks(1, ValueError("disk full")), 2, int, "ask")
