"""What the draft is held to: the target's distribution on the draft vocabulary, made once a batch."""

from dataclasses import dataclass

import torch

from eyas.targets.teacher import TeacherHead

# Rows of full-vocabulary logits alive at a time.
_CHUNK_ROWS = 1024


@dataclass(frozen=True)
class TeacherTargets:
    """Shapes: probabilities [R, W] (renormalised on the draft vocabulary); mass [R] fp32 (their sum, 1 but
    for rounding) and negative_entropy [R] fp32 (their sum of p log p, in nats); argmax [R] (over all V);
    in_draft [R] (whether the draft vocabulary holds the argmax); coverage [R] fp32 (the probability that the
    target gives the draft vocabulary), None where it is 1 or was not asked for."""

    probabilities: torch.Tensor
    mass: torch.Tensor
    negative_entropy: torch.Tensor
    argmax: torch.Tensor
    in_draft: torch.Tensor
    coverage: torch.Tensor | None = None


@torch.no_grad()
def teacher_targets(
    teacher: TeacherHead,
    last: torch.Tensor,
    target_ids: torch.Tensor,
    is_full: bool,
    with_coverage: bool,
) -> TeacherTargets:
    """Apply the teacher to ``last`` [R, D] in chunks; full-vocabulary logits are never all alive.

    ``target_ids`` [W] is the draft vocabulary. The lk and hybrid losses need the coverage.
    """
    in_draft_of = torch.zeros(teacher.head.shape[0], dtype=torch.bool, device=last.device)
    in_draft_of.index_fill_(0, target_ids, True)  # an assignment would wait for the device
    probabilities = torch.empty(len(last), len(target_ids), dtype=last.dtype, device=last.device)
    mass = torch.empty(len(last), dtype=torch.float32, device=last.device)
    negative_entropy = torch.empty_like(mass)
    argmax = torch.empty(len(last), dtype=torch.long, device=last.device)
    coverage = torch.empty_like(mass) if with_coverage and not is_full else None
    for start in range(0, len(last), _CHUNK_ROWS):
        here = slice(start, start + _CHUNK_ROWS)
        logits = teacher.logits(last[here])  # (r, V)
        if last.is_cuda:
            from eyas.kernels.teacher_kernel import restrict

            restrict(
                logits,
                target_ids,
                probabilities[here],
                mass[here],
                negative_entropy[here],
                argmax[here],
                None if coverage is None else coverage[here],
            )
            continue
        argmax[here] = logits.argmax(-1)
        kept = logits if is_full else logits[:, target_ids]
        p = torch.softmax(kept, -1, dtype=torch.float32).to(last.dtype)
        probabilities[here], mass[here] = p, p.float().sum(-1)
        negative_entropy[here] = torch.xlogy(p.float(), p.float()).sum(-1)
        if coverage is not None:
            coverage[here] = (kept.float().logsumexp(-1) - logits.float().logsumexp(-1)).exp()
    return TeacherTargets(probabilities, mass, negative_entropy, argmax, in_draft_of[argmax], coverage)
