"""Compute copies of the draft's fp32 master weights, and the fp32 buffers their gradients add up in.

Weights that read the same input lie together, so that one matrix product serves them: keys and values,
gate and up. Copies are made once a step; gradients are never rounded to the compute dtype.
"""

import torch

from eyas.draft.eagle3 import Eagle3Draft

_MATRICES = {
    "fc": ("fc",),
    "q": ("layers.0.self_attn.q_proj",),
    "kv": ("layers.0.self_attn.k_proj", "layers.0.self_attn.v_proj"),
    "o": ("layers.0.self_attn.o_proj",),
    "gate_up": ("layers.0.mlp.gate_proj", "layers.0.mlp.up_proj"),
    "down": ("layers.0.mlp.down_proj",),
    "head": ("lm_head",),
}


class Weights:
    """``matrix[name]`` [out, in] in the compute dtype; ``vector[name]`` the fp32 norm weights themselves.

    The trainable parameters' ``grad`` are views of the buffers, ``copies`` those of the compute copies by
    parameter. ``start`` begins a new sum.
    """

    def __init__(self, draft: Eagle3Draft, dtype: torch.dtype) -> None:
        trainable = draft.trainable()
        self.dtype = dtype
        self.matrix: dict[str, torch.Tensor] = {}
        self.gradient: dict[str, torch.Tensor] = {}
        self.copies: dict[torch.Tensor, torch.Tensor] = {}
        self._started: set[str] = set()
        for name, parts in _MATRICES.items():
            parameters = [trainable.pop(f"{part}.weight") for part in parts]
            rows, width = sum(len(p) for p in parameters), parameters[0].shape[1]
            device = parameters[0].device
            self.matrix[name] = torch.empty(rows, width, dtype=dtype, device=device)
            self.gradient[name] = torch.zeros(rows, width, dtype=torch.float32, device=device)
            sizes = [len(p) for p in parameters]
            for parameter, copy, gradient in zip(
                parameters, self.matrix[name].split(sizes), self.gradient[name].split(sizes), strict=True
            ):
                parameter.grad = gradient
                self.copies[parameter] = copy
        # What is left are the norms; they stay fp32.
        self.vector = trainable
        assert all(p.ndim == 1 for p in trainable.values())
        for parameter in trainable.values():
            parameter.grad = torch.zeros_like(parameter)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the masters, where something other than the optimizer changed them."""
        torch._foreach_copy_(list(self.copies.values()), list(self.copies.keys()))

    def start(self) -> None:
        """Forget the gradients of the last step."""
        self._started.clear()
        for parameter in self.vector.values():
            assert parameter.grad is not None
            parameter.grad.zero_()

    def finish(self) -> None:
        """Clear what this step never reached, as in a batch without a row."""
        for name, gradient in self.gradient.items():
            if name not in self._started:
                gradient.zero_()

    def add(self, name: str, grad_out: torch.Tensor, inputs: torch.Tensor) -> None:
        """Add grad_out.T @ inputs to a matrix's gradient, in fp32 whatever the dtype of the two.

        Shapes: grad_out [R, out], inputs [R, in].
        """
        total = self.gradient[name]
        beta = int(name in self._started)
        self._started.add(name)
        if grad_out.dtype == total.dtype:
            torch.addmm(total, grad_out.T, inputs, beta=beta, out=total)
        elif total.is_cuda:
            torch.ops.aten.addmm.dtype_out(total, grad_out.T, inputs, total.dtype, beta=beta, out=total)
        else:
            torch.addmm(total, grad_out.T.float(), inputs.float(), beta=beta, out=total)

    def add_vector(self, name: str, gradient: torch.Tensor) -> None:
        total = self.vector[name].grad
        assert total is not None
        total += gradient
