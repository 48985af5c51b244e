"""The toy's module: a state for each token of a round out of aux states and the token that follows them."""

import torch
from torch import nn

from eyas.drafters.common.layers import RMSNorm
from toy_drafter.config import ToyConfig


class ToyDraft(nn.Module):
    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        self.config, width = config, config.hidden_size
        self.embed_tokens = nn.Embedding(config.target_vocab_size, width)
        self.embed_tokens.weight.requires_grad_(False)
        self.fc = nn.Linear(config.num_aux_layers * width, width, bias=False)
        self.shift = nn.Linear(width, config.num_tokens * width, bias=False)
        self.norm = RMSNorm(width, 1e-6)
        self.lm_head = nn.Linear(width, config.vocab_size, bias=False)

    def forward(self, aux: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits [R, S, W] of rows (aux [R, A, D], the token after each [R])."""
        hidden = self.fc(aux.flatten(1)) + self.embed_tokens(tokens).to(aux.dtype)
        states = hidden[:, None] + self.shift(hidden).unflatten(-1, (self.config.num_tokens, -1))
        logits: torch.Tensor = self.lm_head(self.norm(states))
        return logits

    def trainable(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.named_parameters() if p.requires_grad}
