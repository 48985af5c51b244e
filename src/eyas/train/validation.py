"""Loss and acceptance on held-out states, of all ranks together."""

from collections.abc import Iterable

import torch

from eyas.drafters.base import Objective
from eyas.drafters.common.acceptance import Acceptance, replay_answers
from eyas.drafters.common.batch import PackedBatch
from eyas.errors import UserError
from eyas.train.ranks import Ranks


@torch.no_grad()
def measure_acceptance(
    objective: Objective,
    batches: Iterable[PackedBatch],
    num_draft_tokens: int,
    ranks: Ranks,
    device: torch.device,
) -> tuple[list[float], Acceptance]:
    """Return the objective's sums and the acceptance of rounds of ``num_draft_tokens``, over all ranks."""
    sums = torch.zeros(objective.num_sums, dtype=torch.float64, device=device)
    acceptance = Acceptance.empty(num_draft_tokens)
    for batch in batches:
        of_batch, rounds = objective.measure(batch, num_draft_tokens)
        sums += of_batch
        for answer in replay_answers(rounds.rows, rounds.accepted, rounds.depth, num_draft_tokens):
            acceptance += answer
    counts = [acceptance.num_rounds, *acceptance.accepted_at]
    values = torch.cat([sums, torch.tensor(counts, dtype=torch.float64, device=device)])
    ranks.add_up(values)
    *of_sums, num_rounds = values[:-num_draft_tokens].tolist()
    accepted_at = tuple(int(n) for n in values[-num_draft_tokens:].tolist())
    return of_sums, Acceptance(int(num_rounds), accepted_at)


def check_held_out(num: float) -> None:
    """Raises: UserError when there are none of the samples that choose the best checkpoint."""
    if not num:
        raise UserError(
            "nothing is held out, and held-out samples choose the best checkpoint",
            hint="set data.validation_fraction (such as 0.05) or add conversations, and start with --fresh",
        )
