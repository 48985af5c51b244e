"""What measurements of a served draft say: whether they agree with the prediction, and what to serve with."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_TOLERANCE = 0.03  # relative, of acceptance lengths of the same text
_GAIN = 1.02  # a speed-up below this is noise


@dataclass(frozen=True)
class ServingPoint:
    """All prompts at one concurrency, in one round or several. K = 0 is the target alone.

    Lengths are (low, high) bounds; ``tokens_per_s`` is the median of the rounds. ``baseline`` names what
    drafts in place of the trained draft.
    """

    num_draft_tokens: int
    temperature: float
    concurrency: int
    num_prompts: int
    num_tokens: int
    tokens_per_s: float
    latency_s: float  # median of a request
    latency_p95_s: float
    first_token_s: float | None  # median; an endpoint that does not stream cannot tell
    acceptance_length: tuple[float, float] | None
    acceptance_rates: list[float] | None
    speed_up: float | None = None
    tokens_per_s_range: tuple[float, float] | None = None  # the slowest round and the fastest
    first_token_p99_s: float | None = None
    inter_token_s: float | None = None  # between two outputs of a request, median
    inter_token_p99_s: float | None = None
    baseline: str | None = None

    @property
    def slowest(self) -> float:
        return self.tokens_per_s_range[0] if self.tokens_per_s_range else self.tokens_per_s

    @property
    def fastest(self) -> float:
        return self.tokens_per_s_range[1] if self.tokens_per_s_range else self.tokens_per_s


def same_length(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Whether two acceptance lengths, each known to lie within bounds, may agree within 3 %.

    Without rounds, where no answer needed one, both are NaN.
    """
    if math.isnan(one[0]) or math.isnan(other[0]):
        return math.isnan(one[0]) and math.isnan(other[0])
    return one[0] <= other[1] * (1 + _TOLERANCE) and other[0] <= one[1] * (1 + _TOLERANCE)


def diagnose(
    served: tuple[float, float],
    reference: float,
    of_states: tuple[float, float] | None,
    same_text: bool | None,
) -> list[str]:
    """Return the contracts that acceptance lengths contradict; none when all agree. NaN: of no answer.

    ``reference`` is what ``served`` must be; ``of_states`` what this process decodes and what the stored
    states predict of the same answers; ``same_text`` whether the engine's target alone wrote what the one in
    this process did. The last two may be unknown.
    """
    found = []
    if of_states is not None:
        decoded, predicted = of_states
        if not same_length((decoded, decoded), (predicted, predicted)):
            found.append(
                f"states: decoding in this process gives {decoded:.3f}, the stored states predict "
                f"{predicted:.3f}: they are not what the target computes on these prompts"
            )
    if same_text is False:
        found.append(
            "target: the engine alone writes other text than the target in this process: another dtype, "
            "other weights, or other prompt tokens"
        )
    if math.isnan(served[0]) and not math.isnan(reference):
        found.append("export: the engine counts no rounds: it does not decode with the draft")
    elif not same_length(served, (reference, reference)):
        found.append(
            f"export: the engine gets {served[0]:.3f} to {served[1]:.3f}, eyas {reference:.3f}: it computes "
            "another draft (layer ids, norms, rotary positions, d2t) or feeds it other states"
        )
    return found


def with_speed_up(points: Sequence[ServingPoint]) -> list[ServingPoint]:
    """Return the points, those with a draft compared with the target alone under the same conditions."""
    alone = {(p.temperature, p.concurrency): p.tokens_per_s for p in points if not p.num_draft_tokens}
    out = []
    for p in points:
        base = alone.get((p.temperature, p.concurrency)) if p.num_draft_tokens else None
        values = vars(p) | {"speed_up": p.tokens_per_s / base if base else None}
        out.append(ServingPoint(**values))
    return out


def recommend(points: Sequence[ServingPoint]) -> str:
    """Say which K to serve with and up to which concurrency, at the first temperature that was measured.

    Every K whose rounds reach those of the best one is named with it. Baselines are named where they pay.
    """
    known = [p for p in points if p.speed_up is not None]
    if not known:
        return "the target alone was not measured: no recommendation"
    known = [p for p in known if p.temperature == known[0].temperature]
    drafted = [p for p in known if p.baseline is None]
    return _of_drafts(drafted) + _of_baselines(drafted, [p for p in known if p.baseline is not None])


def _of_drafts(drafted: Sequence[ServingPoint]) -> str:
    pays = sorted({p.concurrency for p in drafted if (p.speed_up or 0) >= _GAIN})
    if not pays:
        top = max(drafted, key=lambda p: p.speed_up or 0)
        return (
            f"do not serve this draft here: at best it makes the target {top.speed_up:.2f} times as fast "
            f"(K = {top.num_draft_tokens}, {top.concurrency} requests at a time)"
        )
    k, *alike = recommended(drafted)
    own = {p.concurrency: p.speed_up or 0 for p in drafted if p.num_draft_tokens == k}
    upto = [c for c in sorted(own) if own[c] >= _GAIN]
    also = f" (or {', '.join(map(str, alike))}: no slower within the spread of the rounds)" if alike else ""
    text = f"serve with K = {k}{also}: {own[upto[0]]:.2f} times as fast at {upto[0]} request(s) at a time"
    if len(upto) > 1:
        text += f", {own[upto[-1]]:.2f} times at {upto[-1]}"
    beyond = [c for c in sorted(own) if c > upto[-1]]
    text += f"; from {beyond[0]} on it no longer pays" if beyond else "; it pays wherever it was measured"
    # Better than the recommended one beyond its spread.
    others = {
        best.num_draft_tokens
        for c in pays
        if (best := _best([p for p in drafted if p.concurrency == c])).num_draft_tokens not in (k, *alike)
        and all(p.fastest < best.slowest for p in drafted if p.concurrency == c and p.num_draft_tokens == k)
    }
    return f"{text} (best elsewhere: K = {', '.join(map(str, sorted(others)))})" if others else text


def _of_baselines(drafted: Sequence[ServingPoint], baselines: Sequence[ServingPoint]) -> str:
    """Say what the best baseline gives where the draft was measured with fewest requests."""
    if not baselines:
        return ""
    fewest = min(p.concurrency for p in baselines)
    best = _best([p for p in baselines if p.concurrency == fewest])
    text = f". Without training, {best.baseline} makes it {best.speed_up:.2f} times as fast at {fewest}"
    trained = [p for p in drafted if p.concurrency == fewest]
    return f"{text}, where the draft reaches {_best(trained).speed_up:.2f}" if trained else text


def recommended(drafted: Sequence[ServingPoint]) -> list[int]:
    """Return the K with the largest mean gain, then those whose fastest rounds reach its slowest."""
    gains = _gains(drafted, lambda p: p.tokens_per_s)
    best = max(gains, key=lambda k: gains[k])
    slowest = _gains(drafted, lambda p: p.slowest)[best]
    fastest = _gains(drafted, lambda p: p.fastest)
    return [best, *sorted(k for k in gains if k != best and fastest[k] >= slowest)]


def _best(points: Sequence[ServingPoint]) -> ServingPoint:
    return max(points, key=lambda p: p.tokens_per_s)


def _gains(points: Sequence[ServingPoint], rate: Callable[[ServingPoint], float]) -> dict[int, float]:
    """Return each K's mean speed-up; where it does not pay one would switch it off, which counts as 1."""
    sums: dict[int, list[float]] = {}
    for p in points:
        alone = p.tokens_per_s / (p.speed_up or 1)
        sums.setdefault(p.num_draft_tokens, []).append(max(1.0, rate(p) / alone))
    return {k: sum(values) / len(values) for k, values in sums.items()}
