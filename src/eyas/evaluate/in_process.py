"""Held-out prompts decoded in this process, with the draft and without."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from eyas.drafters.common.acceptance import Acceptance
from eyas.engines.base import Prompt
from eyas.evaluate.decode import Decoded, decode_plain, decode_speculative
from eyas.evaluate.lossless import FirstDifference, first_difference, num_compared
from eyas.evaluate.near_ties import rounding_report
from eyas.progress import Progress


@dataclass(frozen=True)
class Here:
    """What was decoded in this process, by prompt."""

    plain: dict[str, Decoded]
    drafted: dict[str, Decoded]
    differences: list[FirstDifference]

    def rounding(self) -> dict[str, Any]:
        """Return how often the answers part, as ``near_ties.rounding_report``."""
        parted = {d.prompt_id: d for d in self.differences}
        tokens = sum(num_compared(parted.get(name), p.token_ids) for name, p in self.plain.items())
        return rounding_report(len(parted), tokens, [d.gap for d in self.differences], [])


def decode_here(
    engine: Any,
    new_proposer: Callable[[], Any],
    prompts: Sequence[Prompt],
    num_draft_tokens: int,
    max_new_tokens: int,
    eos_token_ids: Sequence[int],
) -> Here:
    """Decode every prompt with and without the draft; ``engine`` opens a ``TargetSession`` for each."""
    here, acceptance = Here({}, {}, []), Acceptance.empty(num_draft_tokens)
    with Progress("evaluate", len(prompts), "prompts") as progress:
        for prompt in prompts:
            ids = list(prompt.token_ids)
            plain = decode_plain(engine.session(), ids, max_new_tokens, eos_token_ids)
            drafted = decode_speculative(
                engine.session(), new_proposer(), ids, num_draft_tokens, max_new_tokens, eos_token_ids
            )
            here.plain[prompt.prompt_id], here.drafted[prompt.prompt_id] = plain, drafted
            difference = first_difference(
                prompt.prompt_id, plain.token_ids, drafted.token_ids, plain.likeliest
            )
            if difference:
                here.differences.append(difference)
            assert drafted.acceptance is not None
            acceptance += drafted.acceptance
            progress.advance(1, f"acceptance length {acceptance.length:.2f}")
    return here
