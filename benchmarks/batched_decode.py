"""Greedy speculative decoding of many prompts at once, to count what is accepted; nothing is timed here.

Rows accept different numbers of tokens a round, so nothing is ever cut from a cache: what the target
refused stays in its slot and is masked out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache

from eyas.drafters.common.acceptance import Acceptance
from eyas.drafters.eagle3.model import Eagle3Draft
from eyas.engines.hidden_state_hooks import HiddenStateHooks
from eyas.engines.transformers.engine import TransformersEngine


@dataclass
class Answer:
    """Tokens after the prompt, and the draft tokens that became part of them, round by round."""

    acceptance: Acceptance
    token_ids: list[int] = field(default_factory=list)
    done: bool = False


@torch.inference_mode()
def decode(
    engine: TransformersEngine,
    draft: Eagle3Draft,
    target_ids: torch.Tensor,
    prompts: Sequence[Sequence[int]],
    num_draft_tokens: int,
    max_new_tokens: int,
) -> list[Answer]:
    """Decode with a chain of ``num_draft_tokens``, as ``eyas.evaluate.decode`` does one by one.

    ``target_ids`` [W] maps draft ids to target ids; the draft reads the engine's own aux layers.
    """
    device = engine.device
    longest = max(len(p) for p in prompts)
    tokens = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros(len(prompts), longest, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        tokens[row, longest - len(prompt) :] = torch.tensor(list(prompt))
        mask[row, longest - len(prompt) :] = True
    tokens, mask = tokens.to(device), mask.to(device)
    lengths = mask.sum(1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache, chain = DynamicCache(), _Chain(draft, target_ids)
    logits, aux = _forward(engine, tokens, mask, positions, cache, logits_to_keep=1)
    newest = logits[:, -1].argmax(-1)
    following, valid = torch.cat([tokens[:, 1:], newest[:, None]], 1), mask
    last = torch.full_like(newest, longest - 1)
    answers = [Answer(Acceptance.empty(num_draft_tokens)) for _ in prompts]
    for answer, token in zip(answers, newest.tolist(), strict=True):
        _extend(engine, answer, [token], max_new_tokens)
    steps = torch.arange(num_draft_tokens + 1, device=device)
    while not all(a.done for a in answers):
        proposal = chain.propose(aux, following, positions, valid, last, num_draft_tokens)
        positions = lengths[:, None] + steps
        mask = torch.cat([mask, mask.new_ones(len(answers), len(steps))], 1)
        logits, aux = _forward(engine, torch.cat([newest[:, None], proposal], 1), mask, positions, cache)
        following = logits.argmax(-1)  # (B, K + 1)
        agrees = (following[:, :-1] == proposal).long().cumprod(1).sum(1)
        for answer, accepted, new in zip(answers, agrees.tolist(), following.tolist(), strict=True):
            if not answer.done:
                taken = _extend(engine, answer, new[: accepted + 1], max_new_tokens)
                answer.acceptance.add_round(min(accepted, taken))
        newest = following.gather(1, agrees[:, None])[:, 0]
        valid = steps <= agrees[:, None]
        mask[:, -len(steps) :] = valid
        lengths, last = lengths + agrees + 1, agrees
    return answers


def _extend(engine: TransformersEngine, answer: Answer, new: Sequence[int], max_new_tokens: int) -> int:
    """Append up to the answer's end; return how many were appended."""
    for count, token in enumerate(new, start=1):
        answer.token_ids.append(token)
        answer.done = token in engine.spec.eos_token_ids or len(answer.token_ids) >= max_new_tokens
        if answer.done:
            return count
    return len(new)


def _forward(
    engine: TransformersEngine,
    tokens: torch.Tensor,
    mask: torch.Tensor,
    positions: torch.Tensor,
    cache: DynamicCache,
    logits_to_keep: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits [B, T, V] and aux states [B, T, A, D] of ``tokens`` [B, T]."""
    with HiddenStateHooks(engine.model, engine.spec.aux_layer_ids) as taps:
        out = engine.model(
            input_ids=tokens,
            attention_mask=mask.long(),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=logits_to_keep,
        )
    return out.logits, taps.stacked()


class _BatchKeys:
    """Keys and values [B, S, kv heads, head_dim] of a batch of sequences, and which of them count [B, S]."""

    def __init__(self) -> None:
        self.kept: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def fork(self) -> "_BatchKeys":
        copy = _BatchKeys()
        copy.kept = self.kept
        return copy

    def begin(self, valid: torch.Tensor) -> None:
        """Say which of the rows that come count: valid [B, R]."""
        self.valid = valid

    def __call__(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Attend from one query a sequence, [B, heads, head_dim]."""
        assert layer == 0, "drafts of one layer"
        new = (keys.unflatten(0, self.valid.shape), values.unflatten(0, self.valid.shape), self.valid)
        if self.kept is not None:
            new = tuple(torch.cat([old, one], 1) for old, one in zip(self.kept, new, strict=True))
        keys, values, mask = self.kept = new
        attended = scaled_dot_product_attention(
            queries[:, :, None],
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=mask[:, None, None],
            enable_gqa=True,
        )
        return attended[:, :, 0]


class _Chain:
    """A draft of one layer with the step-0 keys of a batch of sequences."""

    def __init__(self, draft: Eagle3Draft, target_ids: torch.Tensor) -> None:
        self.draft, self.target_ids = draft, target_ids
        self.keys = _BatchKeys()

    def propose(
        self,
        aux: torch.Tensor,
        following: torch.Tensor,
        positions: torch.Tensor,
        valid: torch.Tensor,
        last: torch.Tensor,
        num_draft_tokens: int,
    ) -> torch.Tensor:
        """Take new rows (aux [B, R, A, D], the token after each [B, R]) and draft from row ``last`` [B].

        Returns target ids [B, num_draft_tokens].
        """
        draft, shape = self.draft, following.shape
        hidden, places = draft.fuse(aux.flatten(0, 1).to(draft.fc.weight.dtype)), positions.flatten()
        rows = torch.arange(shape[0], device=last.device) * shape[1] + last
        self.keys.begin(valid)
        hidden = draft(following.flatten(), hidden, places, self.keys, rows)
        keys, place = self.keys.fork(), places[rows]
        keys.begin(valid.new_ones(shape[0], 1))
        proposal: list[torch.Tensor] = []
        while True:
            proposal.append(self.target_ids[draft.logits(hidden).argmax(-1)])
            if len(proposal) == num_draft_tokens:
                return torch.stack(proposal, 1)
            place = place + 1
            hidden = draft(proposal[-1], draft.carry(hidden), place, keys)
