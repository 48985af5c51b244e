"""What engines count of speculative decoding, from vLLM and SGLang, in process and over HTTP.

Counters are cumulative: only differences mean anything. vLLM also counts draft tokens that it accepts behind
an answer's end, and a round's bonus token may be cut off there, so the acceptance length of what was answered
lies between two numbers that agree but for short answers.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from eyas.errors import UserError

_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+([^\s]+)(?:\s+\d+)?$")
_POSITION = re.compile(r'position="(\d+)"')
_VLLM, _SGLANG = "vllm:spec_decode_", "sglang:"


@dataclass(frozen=True)
class SpecCounters:
    """``accepted_at[k]`` are rounds that accepted draft token k+1; None from an engine that does not say.

    ``accepted`` counts draft tokens, None likewise.
    """

    rounds: int = 0
    accepted: int | None = None
    accepted_at: tuple[int, ...] | None = None

    def __sub__(self, before: "SpecCounters") -> "SpecCounters":
        accepted = None if self.accepted is None else self.accepted - (before.accepted or 0)
        at = None
        if self.accepted_at is not None:
            # vLLM shows a position from the first round on, SGLang from the first that is accepted.
            at = tuple(a - b for a, b in zip_longest(self.accepted_at, before.accepted_at or (), fillvalue=0))
        return SpecCounters(self.rounds - before.rounds, accepted, at)

    def __add__(self, other: "SpecCounters") -> "SpecCounters":
        accepted = None if self.accepted is None else self.accepted + (other.accepted or 0)
        at = None
        if self.accepted_at is not None and other.accepted_at is not None:
            at = tuple(a + b for a, b in zip_longest(self.accepted_at, other.accepted_at, fillvalue=0))
        return SpecCounters(self.rounds + other.rounds, accepted, at)

    def lengths(self, num_tokens: int, num_answers: int) -> tuple[float, float]:
        """Return the acceptance length of answers of ``num_tokens`` in all, as bounds (low, high).

        An answer's first token comes from the prompt's forward pass; every later one from a round. SGLang
        does not count accepted tokens: each answer's last round may have lost one to the answer's end.
        """
        if not self.rounds:
            return float("nan"), float("nan")
        delivered = (num_tokens - num_answers) / self.rounds
        most = num_tokens / self.rounds if self.accepted is None else 1 + self.accepted / self.rounds
        return min(delivered, most), max(delivered, most)

    @property
    def rates(self) -> list[float] | None:
        if self.accepted_at is None:
            return None
        return [n / max(1, self.rounds) for n in self.accepted_at]


def from_vllm(metrics: Iterable[Any]) -> SpecCounters:
    """Read what ``LLM.get_metrics()`` returns; all engines of a data-parallel group together."""
    sums: dict[str, int] = defaultdict(int)
    at: tuple[int, ...] | None = None
    for metric in metrics:
        name = metric.name.removeprefix(_VLLM)
        if name == "num_accepted_tokens_per_pos":
            values = tuple(int(v) for v in metric.values)
            at = values if at is None else tuple(a + b for a, b in zip(at, values, strict=True))
        elif name in ("num_drafts", "num_accepted_tokens"):
            sums[name] += int(metric.value)
    return SpecCounters(sums["num_drafts"], sums["num_accepted_tokens"], at)


def from_reply(reply: Mapping[str, Any]) -> SpecCounters | None:
    """Read what a completion says of its own rounds, None where it says nothing.

    Source: SGLang's ``SpecTokensDetails``, which a request asks for with ``return_spec_tokens_details``;
    entry j of the histogram counts rounds that accepted j draft tokens.
    """
    details = (reply.get("sglext") or {}).get("spec_tokens_details")
    if not isinstance(details, Mapping) or not details.get("spec_verify_ct"):
        return None
    rounds, accepted = int(details["spec_verify_ct"]), int(details.get("spec_num_correct_drafts") or 0)
    by_num = [int(n) for n in details.get("spec_correct_drafts_histogram") or ()]
    # Without all of the rounds in it, the histogram says nothing of positions.
    at = tuple(sum(by_num[k:]) for k in range(1, len(by_num))) if sum(by_num) == rounds else None
    return SpecCounters(rounds, accepted, at)


def from_prometheus(text: str) -> SpecCounters:
    """Read a server's ``/metrics``.

    Raises: UserError when it counts no speculative decoding, or only shows an average of its own.
    """
    sums: dict[str, float] = defaultdict(float)
    at: dict[int, int] = defaultdict(int)
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        name, labels, value = match.groups()
        if name == f"{_VLLM}num_accepted_tokens_per_pos_total":
            position = _POSITION.search(labels or "")
            if position:
                at[int(position[1])] += int(float(value))
        else:
            sums[name] += float(value)
    if f"{_VLLM}num_drafts_total" in sums:
        per_position = tuple(at[k] for k in range(len(at)))
        accepted = int(sums[f"{_VLLM}num_accepted_tokens_total"])
        return SpecCounters(int(sums[f"{_VLLM}num_drafts_total"]), accepted, per_position)
    if f"{_SGLANG}spec_verify_calls_total" in sums:
        return SpecCounters(int(sums[f"{_SGLANG}spec_verify_calls_total"]))
    if f"{_SGLANG}spec_accept_length" in sums:
        raise UserError(
            "this SGLang shows an average acceptance length of its own choice only, and no counter",
            hint="a version with the counter sglang:spec_verify_calls_total is needed",
        )
    raise UserError(
        "the server counts no speculative decoding",
        hint="start it with the draft (eyas serve --print says how); SGLang also needs --enable-metrics",
    )
