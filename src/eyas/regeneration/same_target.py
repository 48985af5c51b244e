"""Is it the target that answers at a server? The target in this process judges its first answers."""

from collections.abc import Callable, Mapping, Sequence

import torch

from eyas.engines.base import TargetSession
from eyas.errors import ContractError
from eyas.evaluate.lossless import near_tie
from eyas.progress import say
from eyas.types import Completion


def count_others(
    new_session: Callable[[], TargetSession],
    prompts: Mapping[str, Sequence[int]],
    answers: Sequence[Completion],
    dtype: str,
) -> tuple[int, int]:
    """Return how many tokens of greedy answers the target would not have taken, and how many there are.

    Near-ties are the target's. An end that the server left out of its answer is not judged.
    """
    num_others = num_tokens = 0
    for answer in answers:
        ids = answer.token_ids[: len(answer.token_ids) - (answer.finish_reason == "stop")]
        if not ids:
            continue
        history = [*prompts[answer.prompt_id], *ids[:-1]]
        logits = new_session().extend(history, num_logits=len(ids))[0].float()
        top = logits.amax(-1)
        gaps = top - logits[torch.arange(len(ids)), torch.tensor(ids, device=logits.device)]
        num_tokens += len(ids)
        num_others += sum(
            gap > near_tie(dtype, best) for gap, best in zip(gaps.tolist(), top.tolist(), strict=True)
        )
    return num_others, num_tokens


def check_share(num_others: int, num_tokens: int, most: float) -> None:
    """Say how many tokens are not the target's. Raises: ContractError for a larger share than ``most``."""
    if not num_others:
        return
    found = f"{num_others:,} of {num_tokens:,} greedy tokens of the server are not the target's"
    if num_others > most * num_tokens:
        raise ContractError(
            f"{found}: it serves another model, or other weights of this one",
            hint="serve target.model, or name what is served in target.model; for a quantised copy of the "
            "target, allow more with regenerate.max_other_share",
        )
    say(f"  {found}, as of a quantised copy")
