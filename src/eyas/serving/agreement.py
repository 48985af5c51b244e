"""The held-out prompts of an evaluation: what is known of each, and what a served draft's answers must be."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from eyas.config.schema import RunConfig
from eyas.data.prepared import read_manifest
from eyas.drafters.common.acceptance import Acceptance
from eyas.engines.base import Prompt
from eyas.engines.spec_decode_metrics import SpecCounters
from eyas.errors import ContractError
from eyas.evaluate.decode import Decoded
from eyas.evaluate.in_process import Here
from eyas.evaluate.lossless import FirstDifference, first_difference, is_near_tie, num_compared
from eyas.evaluate.near_ties import rounding_report
from eyas.progress import say
from eyas.serving.recommend import diagnose
from eyas.serving.results import ServingResults

# Whose stored answers are: the target's greedy ones, of an engine of this run or of a server, or others'.
Writer = Literal["target", "server", "others"]

# By so many tokens answers of a server are told to be the same: later ones part where its rounding differs.
_BEGINNING = 16


@dataclass(frozen=True)
class HeldOut:
    """By prompt: the stored answer as far as it will be decoded, and the acceptance its states predict, as
    sums and round by round.

    All three are empty for a draft that is measured without a run.
    """

    prompts: list[Prompt]
    stored: dict[str, tuple[int, ...]]
    predicted: dict[str, Acceptance]
    here: Here | None
    predicted_rounds: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def as_stored(self, answers: Mapping[str, Sequence[int]]) -> list[str]:
        """Return the prompts whose answer is the stored one: of these alone the prediction is exact."""
        return [name for name, ids in self.stored.items() if tuple(answers[name][: len(ids)]) == ids]

    def total_predicted(self) -> Acceptance:
        return _total(self.predicted, self.predicted)

    def decoded(self) -> dict[str, Acceptance]:
        """Return the acceptance of each prompt that was decoded in this process."""
        return _acceptances(self.here) if self.here else {}

    def total_decoded(self) -> Acceptance | None:
        return _total(self.decoded(), self.here.drafted) if self.here else None


def others_wrote(config: RunConfig) -> str | None:
    """Say whose the stored answers are, unless the target itself wrote them greedily."""
    if config.extract.prepared_data is not None:
        return "samples from elsewhere, whoever wrote their answers"
    if not config.regenerate.enabled:
        return "the answers in the data, which the target did not write"
    if config.regenerate.temperature > 0:
        return f"answers sampled at temperature {config.regenerate.temperature:g}"
    if config.regenerate.extra_body.keys() - {"model"}:
        return "answers of a server that was asked with regenerate.extra_body"
    return None


def writer_of(config: RunConfig, samples_folder: Path) -> Writer:
    """Return who wrote the answers of a run's samples."""
    if others_wrote(config):
        return "others"
    served_by = read_manifest(samples_folder)["served_by"]
    return "target" if served_by == config.regenerate.engine else "server"


def agreement(held_out: HeldOut, measured: ServingResults, written_by: Writer, dtype: str) -> dict[str, Any]:
    """Hold acceptance lengths of the same texts against each other: served, decoded here and predicted."""
    here, answers = held_out.here, {name: ids for name, (ids, _) in measured.singly.items()}
    states, of_states = None, None
    if here is None:
        same, acceptances = held_out.as_stored(answers), held_out.predicted
        expected = "stored"
    else:
        drafted = {name: answer.token_ids for name, answer in here.drafted.items()}
        same = [name for name, ids in drafted.items() if tuple(ids) == answers[name]]
        acceptances = _acceptances(here)
        expected = "decoded here"
        known = held_out.as_stored(drafted)
        states = _total(acceptances, known).length, _total(held_out.predicted, known).length
        of_states = {"compared": len(known), "decoded": _known(states[0]), "predicted": _known(states[1])}
        if held_out.stored and not known:
            say("evaluate: no answer decoded here is the stored one: the prediction is of other text")
    served = _lengths([measured.singly[name] for name in same])
    reference = _total(acceptances, same).length
    if not same:
        say(f"evaluate: the engine gives none of the answers that are {expected}: lengths cannot be compared")
    broken = diagnose(served, reference, states, _same_text(held_out, measured, dtype))
    if others := _not_as_written(held_out, answers, written_by, dtype):
        broken.append(
            f"answers: {others} of {len(held_out.prompts)} are others than the target wrote before: the "
            "prompt tokens, the weights, the dtype or how it samples changed"
        )
    return {
        "compared": len(same),
        "served": None if _known(served[0]) is None else list(served),
        "reference": _known(reference),
        "of_states": of_states,
        "broken": broken,
    }


def check_agreement(served: Mapping[str, Any] | None, dtype: str) -> None:
    """Say which contract is broken; in fp32, where text cannot differ by rounding, that ends the stage.

    Raises: ContractError.
    """
    broken = served["agreement"]["broken"] if served is not None else []
    if broken and dtype == "float32":
        raise ContractError(broken[0], hint="evaluation/report.json has the figures; see docs/serving.md")
    for line in broken:
        say(f"evaluate: warning: {line}")


def _not_as_written(
    held_out: HeldOut, answers: Mapping[str, Sequence[int]], written_by: Writer, dtype: str
) -> int:
    """Return how many answers the target does not give again, if that means something.

    What an engine of this run wrote, the target here must write too, up to near-ties; of what a server wrote,
    or serves, half must begin so.
    """
    here, stored = held_out.here, held_out.stored
    if written_by == "target" and here is not None:
        return sum(_parts(name, here.plain[name], ids, dtype, len(ids)) for name, ids in stored.items())
    if written_by == "others":
        return 0
    given = answers if here is None else {name: plain.token_ids for name, plain in here.plain.items()}
    begin = {name: ids[:_BEGINNING] for name, ids in stored.items()}
    others = sum(tuple(given[name][: len(ids)]) != ids for name, ids in begin.items())
    return others if 2 * others > len(stored) else 0


def _parts(name: str, plain: Decoded, other: Sequence[int], dtype: str, limit: int | None = None) -> bool:
    """Whether another answer parts from the target's, of ``limit`` tokens, where there is no near-tie."""
    difference = first_difference(name, plain.token_ids[:limit], other, plain.likeliest)
    return difference is not None and not is_near_tie(dtype, difference.top, difference.gap)


@dataclass(frozen=True)
class Compared:
    """Where answers with the draft part from the target's, each once with how near a tie it was; how many
    answers and tokens were compared, and how many of these answers part."""

    differences: list[FirstDifference]
    answers: int = 0
    tokens: int = 0
    parted: int = 0

    def rounding(self) -> dict[str, Any]:
        gaps, leads = [d.gap for d in self.differences], [d.lead for d in self.differences]
        return rounding_report(self.parted, self.tokens, gaps, leads)


def compare_answers(measured: ServingResults, here: Here | None, target: Any) -> Compared:
    """Compare answers with the draft with the target's.

    The engine's own ``target`` judges; of a server that has only the draft, the target in this process does.
    """
    prompts = {p.prompt_id: p for p in measured.prompts}
    singly = {name: ids for name, (ids, _) in measured.singly.items()}
    found: set[tuple[FirstDifference, tuple[int, ...]]] = set()  # with the tokens up to it
    compared = tokens = parted = 0
    for concurrency, answers in [*((c, a) for (_, c), a in measured.drafted.items()), (1, singly)]:
        for prompt_id, answer in answers.items():
            likeliest: Sequence[Mapping[int, float]] | None = None
            if measured.alone:
                alone = measured.alone.get(concurrency) or next(iter(measured.alone.values()))
                expected: Sequence[int] = alone[prompt_id]
            elif here is not None and prompt_id in here.plain:
                expected, likeliest = here.plain[prompt_id].token_ids, here.plain[prompt_id].likeliest
            else:
                continue
            compared += 1
            difference = first_difference(prompt_id, expected, answer, likeliest)
            tokens += num_compared(difference, expected)
            if difference:
                parted += 1
                before = *prompts[prompt_id].token_ids, *expected[: difference.position]
                found.add((difference, before))
    ordered = sorted(found, key=lambda pair: (pair[0].prompt_id, pair[1], pair[0].found))
    if not found or not measured.alone:
        return Compared([difference for difference, _ in ordered], compared, tokens, parted)
    say(f"evaluate: answers part from the target's in {len(found)} places; asking it how near a tie each is")
    asked = [_asked(target, difference, before) for difference, before in ordered]
    return Compared(asked, compared, tokens, parted)


def _asked(target: Any, difference: FirstDifference, before: Sequence[int]) -> FirstDifference:
    if -1 in (difference.expected, difference.found):
        return difference  # one answer ends where the other goes on, without an end-of-turn
    logits = target.next_token_logits(before)
    both = difference.expected in logits and difference.found in logits
    lead = logits[difference.found] - logits[difference.expected] if both else None
    return dataclasses.replace(difference.judged(logits), lead=lead)


def _same_text(held_out: HeldOut, measured: ServingResults, dtype: str) -> bool | None:
    """Whether the engine's target alone writes what the one here does, up to near-ties; None if unknown."""
    if held_out.here is None or not measured.alone:
        return None
    alone = next(iter(measured.alone.values()))
    return not any(_parts(name, ours, alone[name], dtype) for name, ours in held_out.here.plain.items())


def _known(length: float) -> float | None:
    return None if math.isnan(length) else length


def _lengths(singly: Sequence[tuple[Sequence[int], SpecCounters]]) -> tuple[float, float]:
    """Return the bounds of the acceptance length of these answers together."""
    accepted = [count.accepted for _, count in singly]
    known = [n for n in accepted if n is not None]
    total = SpecCounters(
        sum(count.rounds for _, count in singly), sum(known) if len(known) == len(accepted) else None
    )
    return total.lengths(sum(len(ids) for ids, _ in singly), len(singly))


def _acceptances(here: Here) -> dict[str, Acceptance]:
    found = {}
    for name, answer in here.drafted.items():
        assert answer.acceptance is not None
        found[name] = answer.acceptance
    return found


def _total(parts: Mapping[str, Acceptance], names: Iterable[str]) -> Acceptance:
    if not parts:  # a draft that is measured without a run has no prediction
        return Acceptance()
    num_draft_tokens = len(next(iter(parts.values())).accepted_at)
    return sum((parts[name] for name in names), Acceptance.empty(num_draft_tokens))
