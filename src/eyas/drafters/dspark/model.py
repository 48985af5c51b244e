"""The DSpark draft: the backbone of block drafts, a Markov head and a confidence head.

Parameter names are those that vLLM and SGLang load. Source: the layout of vLLM's ``Qwen3DSparkModel``.
"""

import torch
from torch import nn

from eyas.drafters.common.block.model import BlockDraft
from eyas.drafters.dspark.config import DSparkConfig

# Matrices with a row a token, and the confidence's single row; none of them is for Muon.
TABLES = frozenset(
    {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight", "confidence_head.proj.weight"}
)


class MarkovHead(nn.Module):
    """The vanilla one: a bias of low rank on the logits, read off the token before."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.target_vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.vocab_size, bias=False)


class ConfidenceHead(nn.Module):
    """The chance that a prediction is accepted, as a logit of the hidden state and the token before."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(config.hidden_size + config.markov_rank, 1)


class DSparkDraft(BlockDraft):
    """Draft tokens of a block are chosen from left to right, each corrected by the one before."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        self.markov_head = MarkovHead(config)
        self.confidence_head = ConfidenceHead(config)

    def block_logits(self, normed: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        bias: torch.Tensor = self.markov_head.markov_w2(self.transition(previous))
        return super().block_logits(normed, previous) + bias * self.config.logit_scale

    def bias_parts(self, previous: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.transition(previous), self.markov_head.markov_w2.weight

    def transition(self, previous: torch.Tensor) -> torch.Tensor:
        """Return the Markov head's state [..., r] behind the tokens ``previous`` [...]."""
        out: torch.Tensor = self.markov_head.markov_w1(previous)
        return out

    def confidence(self, normed: torch.Tensor, transition: torch.Tensor) -> torch.Tensor:
        """Return logits [...] of the chance of acceptance, in fp32 as engines compute them."""
        x = torch.cat([normed.float(), transition.float()], dim=-1)
        proj = self.confidence_head.proj
        with torch.autocast(x.device.type, enabled=False):
            logits = torch.nn.functional.linear(x, proj.weight.float(), proj.bias.float())
        return logits.squeeze(-1)

    def choose(self, normed: torch.Tensor, anchor_token: int, target_ids: torch.Tensor) -> list[int]:
        chosen: list[int] = []
        for hidden in normed:
            before = torch.tensor(chosen[-1] if chosen else anchor_token, device=normed.device)
            chosen.append(int(target_ids[self.block_logits(hidden, before).argmax()]))
        return chosen

    @torch.no_grad()
    def start(self, norm_weight: torch.Tensor, seed: int) -> None:
        """Start as a DFlash draft does, with heads that hardly change it."""
        super().start(norm_weight, seed)
        generator = torch.Generator().manual_seed(seed + 1)
        w1 = self.markov_head.markov_w1.weight
        w1.copy_(torch.randn(w1.shape, generator=generator) * 0.01)
        self.confidence_head.proj.bias.zero_()
