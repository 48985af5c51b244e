"""The EAGLE-3 training step written the slow, obvious way: what every trainer path is compared with.

Every token of the pack is a row at every step, keys of all steps are concatenated under one dense
mask, and supervision is read off the loss mask token by token. Nothing is imported from the trainer.
"""

from collections.abc import Mapping, Sequence

import torch

from eyas.types import TokenizedSample


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotate x [N, heads, head_dim] by its positions [N]."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = (positions[:, None].float() * frequencies)[:, None].to(x.dtype)  # (N, 1, half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat(
        [a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()],
        dim=-1,
    )


def rotate_pairs(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotate x [N, heads, width] as DeepSeek does: neighbours are the parts of one complex number."""
    half = x.shape[-1] // 2
    angles = positions[:, None].to(x.dtype) * theta ** (-torch.arange(half, dtype=x.dtype) / half)
    numbers = torch.view_as_complex(x.unflatten(-1, (half, 2)).contiguous())
    return torch.view_as_real(numbers * torch.polar(torch.ones_like(angles), angles)[:, None]).flatten(-2)


def latent_heads(
    layer: Mapping[str, torch.Tensor],
    x: torch.Tensor,
    positions: torch.Tensor,
    num_heads: int,
    eps: float,
    theta: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return rotated queries, rotated keys and values [N, heads, ...] of latent attention, head by head."""
    own = {k.removeprefix("self_attn.").removesuffix(".weight"): w for k, w in layer.items()}
    rank = own["kv_b_proj"].shape[1]
    turned = own["kv_a_proj_with_mqa"].shape[0] - rank
    value = own["o_proj"].shape[1] // num_heads
    queries = rms_norm(x @ own["q_a_proj"].T, own["q_a_layernorm"], eps) @ own["q_b_proj"].T
    compressed = x @ own["kv_a_proj_with_mqa"].T
    position_key = rotate_pairs(compressed[:, None, rank:], positions, theta)[:, 0]
    expanded = rms_norm(compressed[:, :rank], own["kv_a_layernorm"], eps) @ own["kv_b_proj"].T
    q, k, v = [], [], []
    for of_head, of_query in zip(expanded.chunk(num_heads, 1), queries.chunk(num_heads, 1), strict=True):
        k.append(torch.cat([of_head[:, :-value], position_key], 1))
        v.append(of_head[:, -value:])
        last = rotate_pairs(of_query[:, None, -turned:], positions, theta)[:, 0]
        q.append(torch.cat([of_query[:, :-turned], last], 1))
    return torch.stack(q, 1), torch.stack(k, 1), torch.stack(v, 1)


def layout(samples: Sequence[TokenizedSample]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, document ids and positions [N]."""
    tokens = torch.cat([torch.from_numpy(s.input_ids).long() for s in samples])
    documents = torch.cat([torch.full((len(s),), d) for d, s in enumerate(samples)])
    positions = torch.cat([torch.arange(len(s)) for s in samples])
    return tokens, documents, positions


def is_supervised(samples: Sequence[TokenizedSample], step: int) -> torch.Tensor:
    """Row i at step k: tokens i+1 .. i+2+k of its document are all the assistant's.

    A cut document goes on with one more token of the assistant, unknown but certain.
    """
    flags = []
    for sample in samples:
        mask = [*sample.loss_mask.tolist(), *([True] if sample.cut else [])]
        for i in range(len(sample)):
            served = mask[i + 1 : i + 3 + step]
            # The token that is read must exist; the one that is predicted may be the cut one.
            flags.append(i + 1 + step < len(sample) and len(served) == step + 2 and all(served))
    return torch.tensor(flags)


def reference_logits(
    weights: Mapping[str, torch.Tensor],
    samples: Sequence[TokenizedSample],
    aux: torch.Tensor,
    num_steps: int,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
    theta: float,
    norm_output: bool = False,
    norm_before_residual: bool = False,
    window: int | None = None,
) -> list[torch.Tensor]:
    """Return the draft's logits [N, W] at each step; rows without a token to read hold nonsense.

    ``input_norm`` among the weights norms all aux layers as one. EAGLE-3.1: ``fc_norm.j`` norms aux layer
    j; with ``norm_output`` a step reads the normed output of the one before. A query at position p sees the
    keys of positions above p - ``window``. Shapes: aux [N, A, D].
    """
    tokens, documents, positions = layout(samples)
    num_layers = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("layers."))
    num_rows, groups = len(tokens), num_heads // num_kv_heads
    causal = (documents[:, None] == documents[None]) & torch.ones(num_rows, num_rows).tril().bool()
    own = torch.eye(num_rows, dtype=torch.bool)

    if "input_norm.weight" in weights:
        aux = rms_norm(aux.flatten(1), weights["input_norm.weight"], eps).view_as(aux)
    if "fc_norm.0.weight" in weights:
        norms = [weights[f"fc_norm.{j}.weight"] for j in range(aux.shape[1])]
        aux = torch.stack([rms_norm(aux[:, j], w, eps) for j, w in enumerate(norms)], 1)
    hidden = aux.flatten(1) @ weights["fc.weight"].T
    keys_of: list[list[torch.Tensor]] = [[] for _ in range(num_layers)]
    values_of: list[list[torch.Tensor]] = [[] for _ in range(num_layers)]
    logits = []
    for step in range(num_steps):
        embedded = weights["embed_tokens.weight"][tokens.roll(-1 - step)]
        for number in range(num_layers):
            prefix = f"layers.{number}."
            layer = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
            if number == 0:
                normed = rms_norm(embedded, layer["input_layernorm.weight"], eps)
                normed_hidden = rms_norm(hidden, layer["hidden_norm.weight"], eps)
                mixed = torch.cat([normed, normed_hidden], dim=-1)
                hidden = normed_hidden if norm_before_residual else hidden
            else:
                mixed = rms_norm(hidden, layer["input_layernorm.weight"], eps)
            if "self_attn.kv_b_proj.weight" in layer:
                q, k, v = latent_heads(layer, mixed, positions + step, num_heads, eps, theta)
            else:
                head_dim = layer["self_attn.q_proj.weight"].shape[0] // num_heads
                q, k, v = (
                    (mixed @ layer[f"self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, head_dim))
                    for name in "qkv"
                )
                q, k = rotate(q, positions + step, theta), rotate(k, positions + step, theta)
            keys_of[number].append(k)
            values_of[number].append(v)
            keys = torch.cat(keys_of[number]).repeat_interleave(groups, 1)  # ((step + 1) N, heads, head_dim)
            values = torch.cat(values_of[number]).repeat_interleave(groups, 1)
            seen = torch.cat([causal, *[own] * step], dim=1)
            if window is not None:
                at = torch.cat([positions + earlier for earlier in range(step + 1)])  # of the keys
                seen &= at[None] > (positions + step)[:, None] - window
            scores = torch.einsum("qhd,khd->hqk", q, keys) / q.shape[-1] ** 0.5
            attention = torch.softmax(scores.masked_fill(~seen, float("-inf")), dim=-1)
            attended = torch.einsum("hqk,khd->qhd", attention, values).flatten(1)
            hidden = hidden + attended @ layer["self_attn.o_proj.weight"].T
            x = rms_norm(hidden, layer["post_attention_layernorm.weight"], eps)
            gate, up = x @ layer["mlp.gate_proj.weight"].T, x @ layer["mlp.up_proj.weight"].T
            hidden = hidden + (gate * torch.sigmoid(gate) * up) @ layer["mlp.down_proj.weight"].T
        normed = rms_norm(hidden, weights["norm.weight"], eps)
        logits.append(normed @ weights["lm_head.weight"].T)
        hidden = normed if norm_output else hidden
    return logits


def reference_loss(
    logits: Sequence[torch.Tensor],
    samples: Sequence[TokenizedSample],
    teacher_logits: torch.Tensor,
    target_ids: torch.Tensor,
    step_decay: float,
) -> torch.Tensor:
    """Return the KL to the teacher on the draft vocabulary, summed over rows and weighted by step.

    Shapes: teacher_logits [N, V], the target's own for every token; target_ids [W].
    """
    in_draft = torch.isin(teacher_logits.argmax(-1), target_ids)
    teacher = torch.log_softmax(teacher_logits[:, target_ids], -1)
    loss = torch.zeros((), dtype=teacher.dtype)
    for step, of_step in enumerate(logits):
        draft = torch.log_softmax(of_step, -1)
        for row in is_supervised(samples, step).nonzero().flatten().tolist():
            judge = row + 1 + step
            if in_draft[judge]:
                p = teacher[judge]
                loss = loss + step_decay**step * (p.exp() * (p - draft[row])).sum()
    return loss
