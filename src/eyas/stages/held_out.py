"""The held-out prompts of an evaluation: what is known of each, and what a served draft's answers must be."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eyas.config.schema import RunConfig
from eyas.engines.base import Prompt
from eyas.engines.counters import SpecCounters
from eyas.evaluate.decode import Decoded
from eyas.evaluate.lossless import FirstDifference, first_difference, is_near_tie
from eyas.evaluate.served import diagnose
from eyas.progress import say
from eyas.stages.measured import Measured
from eyas.train.metrics import Acceptance

# Answers are told to be the same ones by so many tokens: in 16 bits, long ones part at some near-tie.
_BEGINNING = 16


@dataclass(frozen=True)
class Here:
    """What was decoded in this process, by prompt."""

    plain: dict[str, Decoded]
    drafted: dict[str, Decoded]
    differences: list[FirstDifference]


@dataclass(frozen=True)
class HeldOut:
    """By prompt: the stored answer as far as it will be decoded, and the acceptance that its states predict.

    ``from_target`` says that the target wrote the stored answers, greedily.
    """

    prompts: list[Prompt]
    stored: dict[str, tuple[int, ...]]
    predicted: dict[str, Acceptance]
    from_target: bool
    here: Here | None

    def as_stored(self, answers: Mapping[str, Sequence[int]]) -> list[str]:
        """Return the prompts whose answer is the stored one: of these alone the prediction is exact."""
        return [name for name, ids in self.stored.items() if tuple(answers[name][: len(ids)]) == ids]

    def total_predicted(self) -> Acceptance:
        return _total(self.predicted, self.predicted)

    def total_decoded(self) -> Acceptance | None:
        return _total(_acceptances(self.here), self.here.drafted) if self.here else None


def others_wrote(config: RunConfig) -> str | None:
    """Say whose the stored answers are, unless the target itself wrote them greedily."""
    if config.extract.prepared_data is not None:
        return "samples from elsewhere, whoever wrote their answers"
    if not config.regenerate.enabled:
        return "the answers in the data, which the target did not write"
    if config.regenerate.temperature > 0:
        return f"answers sampled at temperature {config.regenerate.temperature:g}"
    return None


def agreement(held_out: HeldOut, measured: Measured, dtype: str) -> dict[str, Any]:
    """Hold acceptance lengths of the same texts against each other: served, decoded here and predicted."""
    here, answers = held_out.here, {name: ids for name, (ids, _) in measured.singly.items()}
    if here is None:
        same, acceptances, states = held_out.as_stored(answers), held_out.predicted, None
        plain: Mapping[str, Sequence[int]] = answers
    else:
        plain = {name: answer.token_ids for name, answer in here.plain.items()}
        drafted = {name: answer.token_ids for name, answer in here.drafted.items()}
        same = [name for name, ids in drafted.items() if tuple(ids) == answers[name]]
        acceptances = _acceptances(here)
        known = held_out.as_stored(drafted)
        states = _total(acceptances, known).length, _total(held_out.predicted, known).length
    served = _lengths([measured.singly[name] for name in same])
    reference = _total(acceptances, same).length
    broken = diagnose(served, reference, states, _same_text(held_out, measured, dtype))
    begun = sum(tuple(plain[n][:_BEGINNING]) == ids[:_BEGINNING] for n, ids in held_out.stored.items())
    if held_out.from_target and 2 * begun < len(held_out.prompts):
        broken.append(
            f"answers: only {begun} of {len(held_out.prompts)} begin as the target wrote them for the "
            "training: the prompt tokens, the weights or the dtype were others"
        )
    elif not same:
        expected = "decoded here" if here else "stored"
        say(f"evaluate: the engine gives none of the answers that are {expected}: lengths cannot be compared")
    return {
        "compared": len(same),
        "served": list(served) if same else None,
        "reference": reference if same else None,
        "broken": broken,
    }


def differences_of(measured: Measured, here: Here | None, target: Any) -> list[FirstDifference]:
    """Return where answers with the draft part from the target's own, with how near a tie that was.

    The engine's own ``target`` judges; of a server that has only the draft, the target in this process does.
    """
    prompts = {p.prompt_id: p for p in measured.prompts}
    found: set[tuple[FirstDifference, tuple[int, ...]]] = set()  # with the tokens up to it
    for (_, concurrency), answers in measured.drafted.items():
        for prompt_id, answer in answers.items():
            if measured.alone:
                expected: Sequence[int] = measured.alone[concurrency][prompt_id]
                difference = first_difference(prompt_id, expected, answer)
            elif here is not None and prompt_id in here.plain:
                own = here.plain[prompt_id]
                expected, difference = (
                    own.token_ids,
                    first_difference(prompt_id, own.token_ids, answer, own.likeliest),
                )
            else:
                continue
            if difference:
                before = *prompts[prompt_id].token_ids, *expected[: difference.position]
                found.add((difference, before))
    ordered = sorted(found, key=lambda pair: (pair[0].prompt_id, pair[1], pair[0].found))
    if not found or not measured.alone:
        return [difference for difference, _ in ordered]
    say(f"evaluate: {len(found)} answers differ from the target's own; asking it how near those ties are")
    return [_asked(target, difference, before) for difference, before in ordered]


def _asked(target: Any, difference: FirstDifference, before: Sequence[int]) -> FirstDifference:
    if -1 in (difference.expected, difference.found):
        return difference  # one answer ends where the other goes on, without an end-of-turn
    return difference.judged(target.next_token_logits(before))


def _same_text(held_out: HeldOut, measured: Measured, dtype: str) -> bool | None:
    """Whether the engine's target alone writes what the one here does, up to near-ties; None if unknown."""
    if held_out.here is None or not measured.alone:
        return None
    alone = next(iter(measured.alone.values()))
    for name, ours in held_out.here.plain.items():
        difference = first_difference(name, ours.token_ids, alone[name], ours.likeliest)
        if difference and not is_near_tie(dtype, difference.top, difference.gap):
            return False
    return True


def _lengths(singly: Sequence[tuple[Sequence[int], SpecCounters]]) -> tuple[float, float]:
    """Return the bounds of the acceptance length of these answers together."""
    accepted = [count.accepted for _, count in singly]
    known = [n for n in accepted if n is not None]
    total = SpecCounters(
        sum(count.rounds for _, count in singly), sum(known) if len(known) == len(accepted) else None
    )
    return total.lengths(sum(len(ids) for ids, _ in singly), len(singly))


def _acceptances(here: Here) -> dict[str, Acceptance]:
    return {name: answer.acceptance for name, answer in here.drafted.items() if answer.acceptance is not None}


def _total(parts: Mapping[str, Acceptance], names: Iterable[str]) -> Acceptance:
    num_draft_tokens = len(next(iter(parts.values())).accepted_at)
    return sum((parts[name] for name in names), Acceptance.empty(num_draft_tokens))
