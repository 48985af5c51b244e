"""Real speculative decoding in this process: K draft tokens a round, verified by the target."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from eyas.drafters.base import Proposer
from eyas.drafters.common.acceptance import Acceptance
from eyas.engines.base import TargetSession

_NUM_LIKELIEST = 20
# Takes the target's logits [V] and the proposed token (None after the last one); returns the next token of
# the answer, and whether it is the proposed one.
Choose = Callable[[torch.Tensor, int | None], tuple[int, bool]]


@dataclass(frozen=True)
class Decoded:
    """Tokens after the prompt (with the end-of-turn if reached), and the time they took.

    ``likeliest`` are the highest logits at each token, by token, of the target alone; ``rounds`` the draft
    tokens proposed in each round, and how many of them were accepted.
    """

    token_ids: list[int]
    seconds: float
    likeliest: tuple[dict[int, float], ...] = ()
    acceptance: Acceptance | None = None
    rounds: tuple[tuple[tuple[int, ...], int], ...] = ()


def greedy(logits: torch.Tensor, proposed: int | None) -> tuple[int, bool]:
    """Choose the likeliest token."""
    token = int(logits.float().argmax())
    return token, token == proposed


@torch.inference_mode()
def decode_plain(
    session: TargetSession,
    prompt: Sequence[int],
    max_new_tokens: int,
    eos_token_ids: Sequence[int],
    choose: Choose = greedy,
) -> Decoded:
    """Decode with the target alone, one token a forward."""
    started = time.perf_counter()
    tokens: list[int] = []
    highest: list[tuple[torch.Tensor, torch.Tensor]] = []
    logits, _ = session.extend(prompt, num_logits=1)
    while True:
        token, _ = choose(logits[-1], None)
        tokens.append(token)
        highest.append(logits[-1].float().topk(min(_NUM_LIKELIEST, logits.shape[-1])))
        if token in eos_token_ids or len(tokens) >= max_new_tokens:
            break
        logits, _ = session.extend([token])
    seconds = time.perf_counter() - started
    likeliest = (dict(zip(ids.tolist(), values.tolist(), strict=True)) for values, ids in highest)
    return Decoded(tokens, seconds, tuple(likeliest))


@torch.inference_mode()
def decode_speculative(
    session: TargetSession,
    draft: Proposer,
    prompt: Sequence[int],
    num_draft_tokens: int,
    max_new_tokens: int,
    eos_token_ids: Sequence[int],
    choose: Choose = greedy,
) -> Decoded:
    """Decode with ``num_draft_tokens`` drafted tokens a target forward.

    Counted are the draft tokens that become part of the answer: none behind its end.
    """
    started = time.perf_counter()
    acceptance = Acceptance.empty(num_draft_tokens)
    rounds: list[tuple[tuple[int, ...], int]] = []
    logits, aux = session.extend(prompt, num_logits=1)
    token, _ = choose(logits[-1], None)
    tokens = [token]
    # The draft's row i reads the state of token i and the token after it.
    following = [*prompt[1:], token]
    while tokens[-1] not in eos_token_ids and len(tokens) < max_new_tokens:
        proposal = draft.propose(aux, following, num_draft_tokens)
        logits, states = session.extend([tokens[-1], *proposal])
        room = max_new_tokens - len(tokens)
        new: list[int] = []
        for place in range(num_draft_tokens + 1):
            proposed = proposal[place] if place < num_draft_tokens else None
            token, agrees = choose(logits[place], proposed)
            new.append(token)
            if not agrees or token in eos_token_ids or len(new) == room:
                break
        num_accepted = sum(a == b for a, b in zip(new, proposal, strict=False))
        acceptance.add_round(num_accepted)
        rounds.append((tuple(proposal), num_accepted))
        tokens += new
        # Of the tokens just run, all but the newest are verified and stay in the cache.
        session.truncate(len(prompt) + len(tokens) - 1)
        aux, following = states[: len(new)], new
    return Decoded(tokens, time.perf_counter() - started, (), acceptance, tuple(rounds))
