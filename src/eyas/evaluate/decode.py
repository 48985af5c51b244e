"""Real speculative decoding in this process: a chain of K draft tokens, verified greedily by the target."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from eyas.drafters.common.acceptance import Acceptance
from eyas.drafters.eagle3.model import Eagle3Draft
from eyas.engines.base import TargetSession

_NUM_LIKELIEST = 20


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


@torch.inference_mode()
def decode_plain(
    session: TargetSession, prompt: Sequence[int], max_new_tokens: int, eos_token_ids: Sequence[int]
) -> Decoded:
    """Decode greedily with the target alone, one token a forward."""
    started = time.perf_counter()
    tokens: list[int] = []
    highest: list[tuple[torch.Tensor, torch.Tensor]] = []
    logits, _ = session.extend(prompt, num_logits=1)
    while True:
        token = _greedy(logits[-1])
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
    logits, aux = session.extend(prompt, num_logits=1)
    token = _greedy(logits[-1])
    tokens = [token]
    # The draft's row i reads the state of token i and the token after it.
    following = [*prompt[1:], token]
    while tokens[-1] not in eos_token_ids and len(tokens) < max_new_tokens:
        proposal = draft.propose(aux, following, num_draft_tokens)
        logits, states = session.extend([tokens[-1], *proposal])
        room = max_new_tokens - len(tokens)
        new: list[int] = []
        for place in range(num_draft_tokens + 1):
            token = _greedy(logits[place])
            new.append(token)
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
    return Decoded(tokens, time.perf_counter() - started, (), acceptance, tuple(rounds))


class DraftChain:
    """The draft with its cache of step-0 keys and values, layer by layer, for one sequence."""

    def __init__(self, draft: Eagle3Draft, target_ids: torch.Tensor) -> None:
        self.draft = draft
        self.target_ids = target_ids
        config, like = draft.config, draft.fc.weight
        keys = like.new_empty(0, config.num_key_value_heads, config.head_dim)
        values = like.new_empty(0, config.num_key_value_heads, config.value_dim)
        self.cache = [(keys, values) for _ in draft.layers]

    def propose(self, aux: torch.Tensor, following: Sequence[int], num_draft_tokens: int) -> list[int]:
        """Take verified rows (aux [R, A, D], the token after each) and draft from the last of them."""
        draft = self.draft
        weight = draft.fc.weight
        device = weight.device
        seen = len(self.cache[0][0])
        tokens = torch.tensor(list(following), device=device)
        positions = torch.arange(seen, seen + len(tokens), device=device)
        hidden = draft.fuse(aux.to(device, weight.dtype))
        hidden = self._step(tokens, hidden, positions, self.cache)[-1:]

        position, chain = positions[-1:], list(self.cache)
        proposal: list[int] = []
        while True:
            proposal.append(int(self.target_ids[draft.logits(hidden)[0].argmax()]))
            if len(proposal) == num_draft_tokens:
                return proposal
            position = position + 1
            tokens = torch.tensor([proposal[-1]], device=device)
            hidden = self._step(tokens, draft.carry(hidden), position, chain)

    def _step(
        self,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        cache: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        """Run rows through all layers, adding to ``cache``; only the last row goes through the last one."""
        draft, mixed = self.draft, self.draft.mix(tokens, hidden)
        for layer, (keys, values) in enumerate(cache):
            if layer:
                mixed = draft.enter(hidden, layer)
            new_keys, new_values = draft.keys_values(mixed, positions, layer)
            cache[layer] = torch.cat([keys, new_keys]), torch.cat([values, new_values])
            if layer == len(cache) - 1:
                hidden, mixed, positions = hidden[-1:], mixed[-1:], positions[-1:]
            attended = _attend_last(draft.queries(mixed, positions, layer), *cache[layer])
            hidden = draft.finish(attended, hidden, layer)
        return hidden


def _attend_last(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Attend from the last rows [R, heads, head_dim] to keys [S, kv heads, head_dim], each up to its own."""
    num_rows, num_keys = len(queries), len(keys)
    seen = torch.ones(num_rows, num_keys, dtype=torch.bool, device=keys.device).tril(num_keys - num_rows)
    out: torch.Tensor = torch.nn.functional.scaled_dot_product_attention(
        queries.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=None if num_rows == 1 else seen,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)


def _greedy(logits: torch.Tensor) -> int:
    return int(logits.float().argmax())
