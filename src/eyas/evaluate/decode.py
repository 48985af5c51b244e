"""Real speculative decoding in this process: a chain of K draft tokens, verified greedily by the target."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from eyas.draft.eagle3 import Eagle3Draft
from eyas.engines.base import TargetSession
from eyas.train.metrics import Acceptance


@dataclass(frozen=True)
class Decoded:
    """Tokens after the prompt (with the end-of-turn if reached), the time they took, and the target's
    top-two logit gap at each of them."""

    token_ids: list[int]
    seconds: float
    gaps: list[float]
    acceptance: Acceptance | None = None
    # Draft tokens proposed in each round, and how many of them were accepted.
    rounds: tuple[tuple[tuple[int, ...], int], ...] = ()


@torch.inference_mode()
def decode_plain(
    session: TargetSession, prompt: Sequence[int], max_new_tokens: int, eos_token_ids: Sequence[int]
) -> Decoded:
    """Decode greedily with the target alone, one token a forward."""
    started = time.perf_counter()
    tokens: list[int] = []
    gaps: list[float] = []
    logits, _ = session.extend(prompt)
    while True:
        token, gap = _greedy(logits[-1])
        tokens.append(token)
        gaps.append(gap)
        if token in eos_token_ids or len(tokens) >= max_new_tokens:
            return Decoded(tokens, time.perf_counter() - started, gaps)
        logits, _ = session.extend([token])


@torch.inference_mode()
def decode_speculative(
    session: TargetSession,
    draft: "DraftChain",
    prompt: Sequence[int],
    num_draft_tokens: int,
    max_new_tokens: int,
    eos_token_ids: Sequence[int],
) -> Decoded:
    """Decode greedily with ``num_draft_tokens`` drafted tokens a target forward.

    Counted are the draft tokens that become part of the answer: none behind its end.
    """
    started = time.perf_counter()
    acceptance = Acceptance.empty(num_draft_tokens)
    rounds: list[tuple[tuple[int, ...], int]] = []
    logits, aux = session.extend(prompt)
    token, gap = _greedy(logits[-1])
    tokens, gaps = [token], [gap]
    # The draft's row i reads the state of token i and the token after it.
    following = [*prompt[1:], token]
    while tokens[-1] not in eos_token_ids and len(tokens) < max_new_tokens:
        proposal = draft.propose(aux, following, num_draft_tokens)
        logits, states = session.extend([tokens[-1], *proposal])
        room = max_new_tokens - len(tokens)
        new: list[int] = []
        for place in range(num_draft_tokens + 1):
            token, gap = _greedy(logits[place])
            new.append(token)
            gaps.append(gap)
            agrees = place < num_draft_tokens and proposal[place] == token
            if not agrees or token in eos_token_ids or len(new) == room:
                break
        num_accepted = sum(a == b for a, b in zip(new, proposal, strict=False))
        acceptance.add_round(num_accepted)
        rounds.append((tuple(proposal), num_accepted))
        tokens += new
        # Of the tokens just run, all but the newest are verified and stay in the cache.
        session.truncate(len(prompt) + len(tokens) - 1)
        aux, following = states[: len(new)], new
    return Decoded(tokens, time.perf_counter() - started, gaps, acceptance, tuple(rounds))


class DraftChain:
    """The draft with its cache of step-0 keys and values for one sequence."""

    def __init__(self, draft: Eagle3Draft, target_ids: torch.Tensor) -> None:
        self.draft = draft
        self.target_ids = target_ids
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None

    def propose(self, aux: torch.Tensor, following: Sequence[int], num_draft_tokens: int) -> list[int]:
        """Take verified rows (aux [R, A, D], the token after each) and draft from the last of them."""
        draft = self.draft
        weight = draft.fc.weight
        device = weight.device
        seen = 0 if self.keys is None else len(self.keys)
        tokens = torch.tensor(list(following), device=device)
        positions = torch.arange(seen, seen + len(tokens), device=device)
        hidden = draft.fuse(aux.to(device, weight.dtype))
        mixed = draft.mix(tokens, hidden)
        keys, values = draft.keys_values(mixed, positions)
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys])
        self.values = values if self.values is None else torch.cat([self.values, values])

        hidden, mixed, position = hidden[-1:], mixed[-1:], positions[-1:]
        chain_keys, chain_values = self.keys, self.values
        proposal: list[int] = []
        while True:
            queries = draft.queries(mixed, position)
            hidden = draft.finish(_attend_last(queries, chain_keys, chain_values), hidden)
            proposal.append(int(self.target_ids[draft.logits(hidden)[0].argmax()]))
            if len(proposal) == num_draft_tokens:
                return proposal
            hidden, position = draft.carry(hidden), position + 1
            mixed = draft.mix(torch.tensor([proposal[-1]], device=device), hidden)
            keys, values = draft.keys_values(mixed, position)
            chain_keys, chain_values = torch.cat([chain_keys, keys]), torch.cat([chain_values, values])


def _attend_last(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Attend from one row [1, heads, head_dim] to all keys [S, kv heads, head_dim]."""
    out: torch.Tensor = torch.nn.functional.scaled_dot_product_attention(
        queries.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)


def _greedy(logits: torch.Tensor) -> tuple[int, float]:
    """Return the greedy token and how far its logit is above the next one."""
    top = logits.float().topk(2)
    return int(top.indices[0]), float(top.values[0] - top.values[1])
