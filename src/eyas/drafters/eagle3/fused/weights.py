"""Compute copies of the draft's fp32 master weights, and the fp32 buffers their gradients add up in.

Weights that read the same input lie together, so that one matrix product serves them: keys and values,
gate and up. Copies are made once a step; gradients are never rounded to the compute dtype.
"""

from collections.abc import Callable

import torch

from eyas.drafters.eagle3.model import Eagle3Draft

HandOver = Callable[[str, torch.Tensor], None]

# In the order in which a batch's backward pass completes their gradients.
_MATRICES = {
    "head": ("lm_head",),
    "gate_up": ("layers.0.mlp.gate_proj", "layers.0.mlp.up_proj"),
    "down": ("layers.0.mlp.down_proj",),
    "o": ("layers.0.self_attn.o_proj",),
    "q": ("layers.0.self_attn.q_proj",),
    "fc": ("fc",),
    "kv": ("layers.0.self_attn.k_proj", "layers.0.self_attn.v_proj"),
}


class Weights:
    """``matrix[name]`` [out, in] in the compute dtype; ``vector[name]`` the fp32 norm weights themselves.

    The trainable parameters' ``grad`` are views of the buffers, ``copies`` those of the compute copies by
    parameter. ``start`` begins a new sum and ``finish`` ends it. With several ranks, ``hand_over`` takes each
    parameter's gradient, by name, once it is complete, always in the order of ``_MATRICES``.

    Where the masters are ``sliced`` over ranks, the draft's parameters are the compute copies, and the buffer
    of a matrix exists from its first gradient until it is handed over.
    """

    def __init__(self, draft: Eagle3Draft, dtype: torch.dtype, sliced: bool = False) -> None:
        trainable = draft.trainable()
        self.dtype, self.sliced = dtype, sliced
        self.matrix: dict[str, torch.Tensor] = {}
        self.gradient: dict[str, torch.Tensor] = {}
        self.copies: dict[torch.Tensor, torch.Tensor] = {}
        self._rows: dict[str, dict[str, int]] = {}  # of a matrix, how many are whose
        self._started: set[str] = set()
        self._ended: set[str] = set()
        self._is_last = False
        self.hand_over: HandOver | None = None
        self.frozen: set[str] = set()  # matrices that have no gradient
        for name, parts in _MATRICES.items():
            parameters = [trainable.pop(f"{part}.weight") for part in parts]
            sizes = [len(p) for p in parameters]
            self._rows[name] = {f"{part}.weight": size for part, size in zip(parts, sizes, strict=True)}
            rows, width = sum(sizes), parameters[0].shape[1]
            device = parameters[0].device
            self.matrix[name] = torch.empty(rows, width, dtype=dtype, device=device)
            if sliced:
                for parameter, copy in zip(parameters, self.matrix[name].split(sizes), strict=True):
                    parameter.data = copy.copy_(parameter.detach())
                continue
            self.gradient[name] = torch.zeros(rows, width, dtype=torch.float32, device=device)
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
        if self.copies:
            torch._foreach_copy_(list(self.copies.values()), list(self.copies.keys()))

    def start(self) -> None:
        """Forget the gradients of the last step."""
        self._started.clear()
        self._ended.clear()
        self._is_last = False
        for parameter in self.vector.values():
            assert parameter.grad is not None
            parameter.grad.zero_()

    def expect_last(self) -> None:
        """Announce that the batch which comes is the last of this sum."""
        self._is_last = True

    def complete(self, name: str) -> None:
        """Note that the running batch adds no more to this gradient."""
        if self._is_last and self.hand_over and name not in self.frozen:
            self._end(name, self.hand_over)

    def finish(self) -> None:
        """End the sums that no batch completed, as those of a batch without a row."""
        for name in self.matrix:
            if name not in self._ended | self.frozen:
                self._end(name, self.hand_over)
        for name, parameter in self.vector.items():
            assert parameter.grad is not None
            if self.hand_over:
                self.hand_over(name, parameter.grad)

    def _end(self, name: str, hand_over: HandOver | None) -> None:
        self._ended.add(name)
        total = self._buffer(name)
        if name not in self._started:
            total.zero_()
        if hand_over:
            parts = self._rows[name]
            for part, gradient in zip(parts, total.split(list(parts.values())), strict=True):
                hand_over(part, gradient)
        if self.sliced:
            del self.gradient[name]

    def _buffer(self, name: str) -> torch.Tensor:
        if name not in self.gradient:
            self.gradient[name] = torch.empty_like(self.matrix[name], dtype=torch.float32)
        return self.gradient[name]

    def add(self, name: str, grad_out: torch.Tensor, inputs: torch.Tensor) -> None:
        """Add grad_out.T @ inputs to a matrix's gradient, in fp32 whatever the dtype of the two.

        Shapes: grad_out [R, out], inputs [R, in].
        """
        total = self._buffer(name)
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
