"""The held-out prompts of an evaluation: what is known of each, and what a served draft's answers must be."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eyas.engines.base import Prompt
from eyas.evaluate.decode import Decoded
from eyas.evaluate.lossless import UNRELATED, FirstDifference, first_difference, lead_over, near_tie
from eyas.evaluate.served import diagnose
from eyas.progress import say
from eyas.stages.measured import Answers, Measured
from eyas.train.metrics import Acceptance


@dataclass(frozen=True)
class Here:
    """What was decoded in this process, by prompt."""

    plain: dict[str, Decoded]
    drafted: dict[str, Decoded]
    differences: list[FirstDifference]


@dataclass(frozen=True)
class HeldOut:
    """By prompt: the stored answer's tokens, as far as they are known, and what its states predict.

    ``is_greedy`` says that the target wrote the answers itself, greedily, in an engine of this run.
    """

    prompts: list[Prompt]
    stored: dict[str, tuple[int, ...]]
    predicted: dict[str, Acceptance]
    is_greedy: bool
    here: Here | None

    def as_stored(self, answers: Mapping[str, Sequence[int]]) -> list[str]:
        """Return the prompts whose answer is the stored one; only of these is the prediction exact."""
        both = {name: (tuple(answers[name]), stored) for name, stored in self.stored.items()}
        return [name for name, (a, b) in both.items() if a[: len(b)] == b[: len(a)]]

    def total_predicted(self) -> Acceptance:
        return _total(self.predicted.values())

    def total_decoded(self) -> Acceptance | None:
        return _total(_acceptances(self.here.drafted.values())) if self.here else None


def agreement(
    held_out: HeldOut, measured: Measured, served: tuple[float, float], num_draft_tokens: int, dtype: str
) -> dict[str, Any]:
    """Hold the ``served`` bounds of the acceptance length against what this process decoded or predicts."""
    predicted, decoded = held_out.total_predicted(), held_out.total_decoded()
    states = None
    if decoded is not None:
        assert held_out.here is not None
        drafted = held_out.here.drafted
        own = held_out.as_stored({name: answer.token_ids for name, answer in drafted.items()})
        reference: float | None = decoded.length
        if own:
            states = (
                _total(_acceptances(drafted[name] for name in own)).length,
                _total(held_out.predicted[name] for name in own).length,
            )
    else:
        own = held_out.as_stored(_first_answers(measured, num_draft_tokens))
        # A prediction is of the stored text; in 16 bits some answers part from it at near-ties.
        needed = len(held_out.prompts) * (1.0 if dtype == "float32" else 0.5)
        reference = predicted.length if len(own) >= needed else None
    share = f"{len(own)} of {len(held_out.prompts)} stored answers"
    broken = diagnose(served, reference, states, _same_text(held_out, measured, dtype))
    if held_out.is_greedy and dtype == "float32" and len(own) < len(held_out.prompts):
        broken.append(
            f"answers: only {share} are what the target writes: it was asked with other prompt tokens, or "
            "computed with other weights, when it wrote them"
        )
    elif not own or reference is None:
        say(f"evaluate: {share} are the target's own greedy ones: too few to hold the prediction against")
    return {
        "served": list(served),
        "predicted": predicted.length,
        "in_process": decoded.length if decoded else None,
        "as_stored": len(own),
        "broken": broken,
    }


def differences_of(measured: Measured, here: Here | None, target: Any) -> list[FirstDifference]:
    """Return where answers with the draft part from the target's own, with how near a tie that was.

    The engine's own ``target`` judges; of a server that has only the draft, the target in this process does.
    """
    prompts = {p.prompt_id: p for p in measured.prompts}
    found: dict[FirstDifference, list[int]] = {}  # with the tokens up to it
    for (_, concurrency), answers in measured.drafted.items():
        alone = measured.alone.get(concurrency)
        for prompt_id, answer in answers.items():
            if alone is not None:
                expected = list(alone[prompt_id])
                leads = [UNRELATED] * len(expected)
            elif here is not None and prompt_id in here.plain:
                expected, leads = here.plain[prompt_id].token_ids, here.plain[prompt_id].leads
            else:
                continue
            difference = first_difference(prompt_id, expected, answer, leads)
            if difference:
                found[difference] = [*prompts[prompt_id].token_ids, *expected[: difference.position]]
    if not found or not measured.alone:
        return list(found)
    say(f"evaluate: {len(found)} answers differ from the target's own; asking it how near those ties are")
    return [_with_lead(d, target.next_token_logits(before)) for d, before in found.items()]


def _with_lead(difference: FirstDifference, logits: dict[int, float]) -> FirstDifference:
    """Put in the target's highest logit, and how far the worse of the two tokens is below it."""
    if difference.expected < 0 or difference.found < 0:
        return difference  # one answer ends where the other goes on, without an end-of-turn
    lead = lead_over(logits, (difference.expected, difference.found))
    return dataclasses.replace(difference, top=lead.top, gap=lead.gap)


def _same_text(held_out: HeldOut, measured: Measured, dtype: str) -> bool | None:
    """Whether the engine's target alone writes what the one here does, up to near-ties; None if unknown."""
    if held_out.here is None or not measured.alone:
        return None
    alone = next(iter(measured.alone.values()))
    for name, ours in held_out.here.plain.items():
        difference = first_difference(name, ours.token_ids, alone[name], ours.leads)
        if difference and difference.gap > near_tie(dtype, difference.top):
            return False
    return True


def _first_answers(measured: Measured, num_draft_tokens: int) -> Answers:
    return next(answers for (k, _), answers in measured.drafted.items() if k == num_draft_tokens)


def _acceptances(decoded: Iterable[Decoded]) -> Iterator[Acceptance]:
    return (one.acceptance for one in decoded if one.acceptance is not None)


def _total(parts: Iterable[Acceptance]) -> Acceptance:
    first, *others = parts
    return sum(others, first)
