"""The training step of block drafts written the slow, obvious way, in float64: one anchor at a time.

Nothing is imported from the trainer. A block's keys are listed one by one under its mask, supervision is
read off the loss mask token by token, and weights are explicit products.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from eyas.types import TokenizedSample
from reference import rms_norm, rotate


@dataclass(frozen=True)
class Kind:
    """What a block draft is, and how it is trained. ``first_slot`` is 1 for DFlash and 0 for DSpark."""

    first_slot: int
    size: int
    mask_token: int
    causal: bool
    window: int | None
    heads: int
    kv_heads: int
    eps: float
    theta: float
    ce: float
    kl: float
    l1: float
    gamma: float
    alpha: float | None
    confidence: float  # weight of its loss; DFlash has none
    scale: float  # of logits, which the target has too


def depth_of(sample: TokenizedSample, anchor: int, most: int) -> int:
    """Count predictions behind an anchor that are supervised: tokens a .. a+j+1 are all the assistant's."""
    mask = [*sample.loss_mask.tolist(), *([True] if sample.cut else [])]
    depth = 0
    while depth < most and anchor + depth < len(sample) and anchor + depth + 1 < len(mask):
        if not (mask[anchor + depth] and mask[anchor + depth + 1]):
            break
        depth += 1
    return depth


def slot_logits(
    weights: Mapping[str, torch.Tensor], kind: Kind, sample: TokenizedSample, aux: torch.Tensor, anchor: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits [K, W] of one block and its normed hidden states [K, D]; aux [T, A, D]."""
    tokens = torch.from_numpy(sample.input_ids).long()
    context_positions = list(range(anchor))
    slot_positions = [anchor + k for k in range(kind.size)]
    slot_tokens = [int(tokens[anchor])] + [kind.mask_token] * (kind.size - 1)
    fused = rms_norm(
        aux[:anchor].flatten(1) @ weights["fc.weight"].T, weights["hidden_norm.weight"], kind.eps
    )
    hidden = weights["embed_tokens.weight"][slot_tokens]
    num_layers = 1 + max(int(n.split(".")[1]) for n in weights if n.startswith("layers."))
    for number in range(num_layers):
        prefix = f"layers.{number}."
        layer = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
        x = rms_norm(hidden, layer["input_layernorm.weight"], kind.eps)
        rows = torch.cat([fused, x])
        positions = torch.tensor(context_positions + slot_positions)
        head_dim = layer["self_attn.q_norm.weight"].shape[0]
        q = (x @ layer["self_attn.q_proj.weight"].T).unflatten(-1, (kind.heads, head_dim))
        k = (rows @ layer["self_attn.k_proj.weight"].T).unflatten(-1, (kind.kv_heads, head_dim))
        v = (rows @ layer["self_attn.v_proj.weight"].T).unflatten(-1, (kind.kv_heads, head_dim))
        q = rotate(
            rms_norm(q, layer["self_attn.q_norm.weight"], kind.eps), torch.tensor(slot_positions), kind.theta
        )
        k = rotate(rms_norm(k, layer["self_attn.k_norm.weight"], kind.eps), positions, kind.theta)
        attended = []
        for slot, position in enumerate(slot_positions):
            seen = []
            for place, at in enumerate(context_positions + slot_positions):
                near = kind.window is None or at > position - kind.window
                is_context = place < anchor
                ahead = not is_context and kind.causal and at > position
                seen.append(near and not ahead)
            visible = torch.tensor(seen)
            heads = []
            for head in range(kind.heads):
                shared = head // (kind.heads // kind.kv_heads)
                scores = k[visible, shared] @ q[slot, head] / math.sqrt(head_dim)
                heads.append(torch.softmax(scores, 0) @ v[visible, shared])
            attended.append(torch.cat(heads))
        hidden = hidden + torch.stack(attended) @ layer["self_attn.o_proj.weight"].T
        x = rms_norm(hidden, layer["post_attention_layernorm.weight"], kind.eps)
        gate, up = x @ layer["mlp.gate_proj.weight"].T, x @ layer["mlp.up_proj.weight"].T
        hidden = hidden + (gate * torch.sigmoid(gate) * up) @ layer["mlp.down_proj.weight"].T
    normed = rms_norm(hidden, weights["norm.weight"], kind.eps)[kind.first_slot :]
    logits = normed @ weights["lm_head.weight"].T
    if "markov_head.markov_w1.weight" in weights:
        before = [int(tokens[min(anchor + j, len(tokens) - 1)]) for j in range(len(logits))]
        transition = weights["markov_head.markov_w1.weight"][before]
        logits = logits + transition @ weights["markov_head.markov_w2.weight"].T
    return logits * kind.scale, normed


def reference_loss(
    weights: Mapping[str, torch.Tensor],
    kind: Kind,
    samples: Sequence[TokenizedSample],
    aux: torch.Tensor,
    teacher_logits: torch.Tensor,
    target_ids: torch.Tensor,
    anchors: Sequence[tuple[int, int]],
) -> tuple[torch.Tensor, int]:
    """Return the summed loss over anchors (document, position) and the number of supervised predictions.

    Shapes: aux [N, A, D] and teacher_logits [N, V] of all documents one after another; target_ids [W].
    """
    starts = [sum(len(s) for s in samples[:d]) for d in range(len(samples))]
    loss, num = torch.zeros((), dtype=torch.float64), 0
    for document, anchor in anchors:
        sample, start = samples[document], starts[document]
        logits, normed = slot_logits(weights, kind, sample, aux[start : start + len(sample)], anchor)
        depth = depth_of(sample, anchor, len(logits))
        num += depth
        teachers = [teacher_logits[start + anchor + j] for j in range(depth)]
        labels = [int(t.argmax()) for t in teachers]
        known = [label in target_ids.tolist() for label in labels]
        log_q = torch.log_softmax(logits, -1)
        ce = [
            -log_q[j, target_ids.tolist().index(labels[j])] if known[j] else torch.tensor(math.inf)
            for j in range(depth)
        ]
        for j in range(depth):
            fixed = math.exp(-j / kind.gamma)
            weight = fixed
            if kind.alpha is not None:
                weight = 0.0
                for m in range(j, depth):
                    chances = [math.exp(-float(ce[i].detach())) for i in range(m + 1)]
                    weight += math.prod((1 - kind.alpha) * chance + kind.alpha for chance in chances)
            p_all = torch.softmax(teachers[j], -1)
            p = p_all[target_ids] / p_all[target_ids].sum()
            q = log_q[j].exp()
            if known[j]:
                kl = (p * (p.log() - log_q[j])).sum()
                l1 = (q - p).abs().sum()
                loss = loss + weight * (kind.ce * ce[j] + kind.kl * kl + kind.l1 * l1)
            if kind.confidence:
                before = int(sample.input_ids[anchor + j])
                transition = weights["markov_head.markov_w1.weight"][before]
                logit = torch.cat([normed[j], transition]) @ weights["confidence_head.proj.weight"][0]
                chance = torch.sigmoid(logit + weights["confidence_head.proj.bias"][0])
                overlap = float(torch.minimum(p_all[target_ids], q).sum().detach())
                bce = -(overlap * chance.log() + (1 - overlap) * (1 - chance).log())
                loss = loss + kind.confidence * fixed * bce
    return loss, num
