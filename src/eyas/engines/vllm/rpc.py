"""Calls into vLLM's worker processes, wrapped once: nothing else in eyas reads a reply by its index.

``collective_rpc`` returns a list with one entry a rank, or with some executors and arguments a bare
value; indexing the wrong one has cost others three layers of four without an error. Here every reply
carries the rank that sent it. Where one rank's value is wanted, it is taken from the list by its rank.
"""

from typing import Any, Protocol, TypeVar

from eyas.errors import ContractError, EyasError

T = TypeVar("T")
_ENTRY = "eyas_rpc"


class Rpc(Protocol):
    """What is needed of an engine: vLLM's LLM, or an executor."""

    def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()
    ) -> Any: ...


def call_all_ranks(
    engine: Rpc, num_ranks: int, kind: type[T], method: str, *args: Any, timeout_s: float = 600.0
) -> list[T]:
    """Call a worker method on every rank and return the replies in rank order.

    Raises: EyasError naming the rank that failed; ContractError for replies that are too few, too
    many, of another type than ``kind``, or not from ranks 0 to num_ranks - 1.
    """
    return [_value(r, kind, method) for r in _replies(engine, num_ranks, method, args, timeout_s)]


def _replies(
    engine: Rpc, num_ranks: int, method: str, args: tuple[Any, ...], timeout_s: float
) -> list[dict[str, Any]]:
    replies = engine.collective_rpc(_ENTRY, timeout=timeout_s, args=(method, list(args)))
    if not isinstance(replies, list):
        raise ContractError(f"{method}: vLLM returned a {type(replies).__name__} instead of one reply a rank")
    if len(replies) != num_ranks:
        raise ContractError(f"{method}: {len(replies)} replies from {num_ranks} ranks")
    for place, reply in enumerate(replies):
        if not isinstance(reply, dict) or reply.keys() != {"rank", "value", "error"}:
            raise ContractError(f"{method}: reply {place} is {reply!r}, which no eyas worker sends")
    replies = sorted(replies, key=lambda r: r["rank"])
    ranks = [r["rank"] for r in replies]
    if ranks != list(range(num_ranks)):
        raise ContractError(f"{method}: replies came from ranks {ranks}, expected 0 to {num_ranks - 1}")
    for reply in replies:
        if reply["error"] is not None:
            raise EyasError(f"{method} failed on rank {reply['rank']}: {reply['error']}")
    return replies


def _value(reply: dict[str, Any], kind: type[T], method: str) -> T:
    if not isinstance(reply["value"], kind):
        raise ContractError(
            f"{method}: rank {reply['rank']} answered {reply['value']!r}, expected {kind.__name__}"
        )
    return reply["value"]
