"""The EAGLE-3 draft: a decoder layer that reads the next token and the target's fused states, seldom more.

Parameter names are those that vLLM and SGLang load. Training calls ``forward`` once a step of the unroll,
decoding once a draft token; where keys and values are kept is theirs to say.
"""

from collections.abc import Mapping
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from eyas.drafters.common.attention import Attend
from eyas.drafters.common.layers import MLP, Attention, RMSNorm, Rotary, start_std
from eyas.drafters.common.mla import LatentAttention
from eyas.drafters.common.recompute import again
from eyas.drafters.eagle3.config import DraftConfig

# Parameters that are heads (train.train_head=false leaves them as they are), and tables of tokens.
HEADS, TABLES = frozenset({"lm_head.weight"}), frozenset({"embed_tokens.weight"})
# Of the lowest layer: what reads a token together with a hidden state.
_READ_INPUT = ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa")


class DecoderLayer(nn.Module):
    """The lowest layer reads a token and the hidden state, those above it only the hidden state."""

    def __init__(self, config: DraftConfig, is_lowest: bool) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(width, eps)
        if is_lowest:
            self.hidden_norm = RMSNorm(width, eps)
        attention = Attention if config.latent_attention is None else LatentAttention
        self.self_attn = attention(config, 2 * width if is_lowest else width)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = MLP(config)


class Eagle3Draft(nn.Module):
    """Source: EAGLE-3, arXiv 2503.01840; the layout of vLLM's ``LlamaForCausalLMEagle3``, EAGLE-3.1 included,
    or with latent attention that of its ``Eagle3DeepseekV2ForCausalLM``.

    ``embed_tokens`` is the target's and frozen; everything else is trained. A draft of another width has
    an embedding of its own, which starts as the target's best projection and is trained too.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        width, target_width = config.hidden_size, config.target_hidden_size
        self.embed_tokens = nn.Embedding(config.target_vocab_size, width)
        self.embed_tokens.weight.requires_grad_(config.has_own_embedding)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(config.num_aux_layers * target_width, config.rms_norm_eps)
        if config.fc_norm:
            norms = (RMSNorm(target_width, config.rms_norm_eps) for _ in range(config.num_aux_layers))
            self.fc_norm = nn.ModuleList(norms)
        self.fc = nn.Linear(config.num_aux_layers * target_width, width, bias=False)
        self.layers = nn.ModuleList([DecoderLayer(config, not i) for i in range(config.num_layers)])
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.lm_head = nn.Linear(width, config.vocab_size, bias=False)
        self.rotary = Rotary(config)

    def layer(self, number: int) -> DecoderLayer:
        layer = self.layers[number]
        assert isinstance(layer, DecoderLayer)
        return layer

    def fuse(self, aux: torch.Tensor) -> torch.Tensor:
        """Turn aux states [R, A, D] into the first step's hidden states [R, D]."""
        if self.config.norm_before_fc:
            aux = self.input_norm(aux.flatten(1)).view_as(aux)
        if self.config.fc_norm:
            aux = torch.stack([norm(x) for norm, x in zip(self.fc_norm, aux.unbind(1), strict=True)], dim=1)
        out: torch.Tensor = self.fc(aux.flatten(1))
        return out

    def forward(
        self,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        wanted: torch.Tensor | slice | None = None,
        recompute: bool = False,
    ) -> torch.Tensor:
        """Run rows through all layers and return what ``logits`` reads, and ``carry`` hands to the next step.

        Only the ``wanted`` rows [R'] are returned; of the others the last layer only computes keys and
        values.
        With ``recompute`` the backward pass computes the MLPs again.

        Shapes: tokens, positions [R]; hidden [R, D]. Returns [R', D].
        """
        finish = partial(again, self._finish) if recompute else self._finish
        lowest, last = self.layer(0), len(self.layers) - 1
        embedded = self.embed_tokens(tokens).to(hidden.dtype)
        x = torch.cat([lowest.input_layernorm(embedded), lowest.hidden_norm(hidden)], dim=-1)  # (R, 2D)
        for number in range(last + 1):
            layer = self.layer(number)
            if number:
                x = layer.input_layernorm(hidden)
            keys, values = layer.self_attn.keys_values(x, self.rotary, positions)
            if number == last and wanted is not None:
                hidden, x, positions = hidden[wanted], x[wanted], positions[wanted]
            queries = layer.self_attn.queries(x, self.rotary, positions)
            hidden = finish(attend(number, queries, keys, values), hidden, number)
        return hidden

    def _finish(self, attended: torch.Tensor, hidden: torch.Tensor, number: int) -> torch.Tensor:
        """Add attention's output [R, heads, value_dim] and the MLP to the residual ``hidden`` [R, D]."""
        layer = self.layer(number)
        if number == 0 and self.config.norm_before_residual:
            hidden = layer.hidden_norm(hidden)
        hidden = hidden + layer.self_attn.o_proj(attended.flatten(1))
        out: torch.Tensor = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return out

    def carry(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden state that the next step starts from."""
        if not self.config.norm_output:
            return hidden
        out: torch.Tensor = self.norm(hidden)
        return out

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits over the draft vocabulary [R, W]."""
        out: torch.Tensor = self.lm_head(self.norm(hidden))
        return out

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the parameters that training changes, by name."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def initialise(
        self,
        embedding: torch.Tensor,
        head_rows: torch.Tensor,
        norm_weight: torch.Tensor,
        last_layer: Mapping[str, torch.Tensor],
        seed: int,
    ) -> None:
        """Start from the target: its embedding [V, D], final norm [D], head rows [W, D] and last layer.

        ``fc`` starts as a pass-through of the last aux layer with a little noise on all of them: the
        latest state is the best single guess of what the last layer will say. Of ``last_layer`` (weights
        by their names in it) the lowest layer takes those whose shape fits; its attention reads the half of
        the input that holds the hidden state.

        With ``fc_norm`` both start as noise alone: the target's layer was made for states of another size,
        and drafts that start so are accepted no less (benchmarks/acceptance.md).
        """
        generator = torch.Generator().manual_seed(seed)
        width, target_width = self.config.hidden_size, self.config.target_hidden_size
        for parameter in self.trainable().values():
            if parameter.ndim == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * start_std(width))
        if width == target_width:
            passed = torch.eye(width)
            self.embed_tokens.weight.copy_(embedding)
            self.lm_head.weight.copy_(head_rows)
            self.norm.weight.copy_(norm_weight)
        else:
            # (D, width): what of the target's space the draft sees, the same for what it reads and writes.
            projection = main_directions(head_rows.float() * norm_weight.float(), width)
            passed = projection.T
            self.embed_tokens.weight.copy_(embedding.float() @ main_directions(embedding.float(), width))
            self.lm_head.weight.copy_((head_rows.float() * norm_weight.float()) @ projection)
        if self.config.fc_norm:
            return
        self.fc.weight[:, -target_width:] += passed
        own = dict(self.layer(0).named_parameters())
        for name, weight in last_layer.items():
            # What the target normalises on its way into attention is what the draft calls hidden.
            mine = own.get(name.replace("input_layernorm", "hidden_norm"))
            if mine is None:
                continue
            if mine.shape == weight.shape:
                mine.copy_(weight)
            elif name.split(".")[-2] in _READ_INPUT and mine.shape == (len(weight), 2 * weight.shape[1]):
                mine[:, width:] = weight


def main_directions(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Return orthonormal columns [D, count] that keep most of rows [N, D]; zeros beyond D columns."""
    gram = rows.T @ rows
    vectors = torch.linalg.eigh(gram).eigenvectors.flip(1)[:, :count]  # ascending before the flip
    return F.pad(vectors, (0, count - vectors.shape[1]))
