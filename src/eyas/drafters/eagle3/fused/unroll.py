"""The unroll with its backward pass written out: the fast path, equal to ``eyas.drafters.eagle3.unroll``.

What makes it fast: every step's activations lie in one buffer, so each weight's gradient is one long
matrix product over all steps; gradients overwrite the activations they no longer need; the head's logits
turn into their own gradient in the forward pass and are gone; weights are cast once a step.
"""

from collections.abc import Iterator
from typing import Any

import torch

from eyas.drafters.common.batch import PackedBatch
from eyas.drafters.common.loss import LossKind
from eyas.drafters.common.teacher_targets import TeacherTargets
from eyas.drafters.eagle3.fused import plain_ops
from eyas.drafters.eagle3.fused.activations import Saved
from eyas.drafters.eagle3.fused.layout import Steps
from eyas.drafters.eagle3.fused.weights import Weights
from eyas.drafters.eagle3.model import Eagle3Draft
from eyas.drafters.eagle3.ttt_rows import RowPlan
from eyas.drafters.eagle3.unroll import UnrollResult, count_accepted
from eyas.kernels.head_layout import Heads

# Logits alive at a time, at most: rows of one product of the head.
_HEAD_ROWS = 8192

_EMBED, _HIDDEN = "layers.0.input_layernorm.weight", "layers.0.hidden_norm.weight"
_POST, _FINAL = "layers.0.post_attention_layernorm.weight", "norm.weight"


class FusedUnroll:
    """Computes a batch's loss, and adds its gradients to the buffers of ``weights``.

    Without ``train_head`` the head's gradient is left out. With ``recompute`` the MLP is computed again in
    the backward pass, step by step, and nothing of it is kept. ``sliced`` is that of the weights.
    """

    def __init__(
        self,
        draft: Eagle3Draft,
        dtype: torch.dtype,
        train_head: bool = True,
        recompute: bool = False,
        sliced: bool = False,
    ) -> None:
        config = draft.config
        self.draft, self.train_head, self.recompute = draft, train_head, recompute
        self.eps = config.rms_norm_eps
        self.heads = Heads(
            config.num_key_value_heads,
            config.num_attention_heads // config.num_key_value_heads,
            config.head_dim,
        )
        self.weights = Weights(draft, dtype, sliced)
        self.weights.frozen = set() if train_head else {"head"}
        self.weights.refresh()
        self.ops: Any = plain_ops
        if draft.fc.weight.is_cuda:
            from eyas.drafters.eagle3.fused import gpu_ops

            self.ops = gpu_ops

    @staticmethod
    def fits(draft: Eagle3Draft) -> bool:
        """Whether the draft has one plain layer, tiles for its heads, and no embedding to be trained."""
        config = draft.config
        if config.norm_before_residual or config.norm_before_fc:
            return False
        if config.has_own_embedding or config.latent_attention is not None:
            return False
        group = config.num_attention_heads // config.num_key_value_heads
        return config.num_layers == 1 and config.head_dim in (16, 32, 64, 128) and group <= 64

    @torch.no_grad()
    def run(
        self,
        batch: PackedBatch[RowPlan],
        targets: TeacherTargets,
        target_ids: torch.Tensor,
        step_decay: float,
        loss: LossKind,
        with_gradients: bool = True,
    ) -> UnrollResult:
        """Unroll over a batch; with ``with_gradients``, add the gradients of the summed loss."""
        steps = Steps.of(batch, self.draft.config.sliding_window)
        row_losses = torch.zeros(steps.num_rows, dtype=torch.float32, device=batch.tokens.device)
        agrees: list[torch.Tensor] = []
        saved = self._start(batch, steps)
        for k, here in enumerate(steps.rows):
            self._forward_step(batch, steps, saved, k)
            index = batch.plan.teacher[k]
            best = self._hold_to_teacher(
                saved, here, targets, index, step_decay**k, loss, with_gradients, row_losses[here]
            )
            agrees.append((target_ids[best] == targets.argmax[index]) & targets.in_draft[index])
        if with_gradients:
            self.weights.complete("head")
            self._backward(batch, steps, saved)
        sums = [row_losses[here].sum() for here in steps.rows]
        sums += [row_losses.new_zeros(())] * (batch.plan.num_steps - len(sums))
        step_losses = torch.stack(sums)
        decay = step_decay ** torch.arange(len(sums), device=row_losses.device)
        accepted, depth = count_accepted(batch.plan, agrees)
        return UnrollResult((step_losses * decay).sum(), batch.num_supervised, step_losses, accepted, depth)

    def _start(self, batch: PackedBatch[RowPlan], steps: Steps) -> Saved:
        """Compute the step-0 keys and values of every row, and make room for the rest."""
        matrix, config, keys = self.weights.matrix, self.draft.config, batch.plan.keys
        # The last token of each document is fused for nothing: cheaper than gathering the others.
        fused_input = self._fused_input(batch.aux)
        fused = fused_input @ matrix["fc"].T
        first_hidden = fused.new_empty(len(keys), config.hidden_size)
        first_mixed = fused.new_empty(len(keys), 2 * config.hidden_size)
        self._mix(batch.tokens[keys + 1], fused, keys, first_mixed, first_hidden)
        first_kv = first_mixed @ matrix["kv"].T
        cos, sin = self._turns(batch.positions[keys])
        self.ops.rotate(first_kv, cos, sin, self.heads.kv_heads, first_kv)
        return Saved.room(config, steps, fused_input, first_hidden, first_mixed, first_kv, self.recompute)

    def _forward_step(self, batch: PackedBatch[RowPlan], steps: Steps, saved: Saved, k: int) -> None:
        matrix, here, plan = self.weights.matrix, steps.rows[k], batch.plan
        cos, sin = self._turns(batch.positions[plan.rows[k]] + k)
        saved.turns.append((cos, sin))
        mixed, middle = saved.mixed[here], saved.middle[here]
        if k == 0:
            torch.index_select(saved.first_mixed, 0, plan.key_places[0], out=mixed)
            torch.index_select(saved.first_hidden, 0, plan.key_places[0], out=middle)
        else:
            self._mix(steps.read[k], saved.carried[steps.rows[k - 1]], plan.keep[k], mixed, middle)
            own_kv = torch.mm(mixed, matrix["kv"].T, out=saved.own_kv[steps.own[k]])
            self.ops.rotate(own_kv, cos, sin, self.heads.kv_heads, own_kv)
        queries = torch.mm(mixed, matrix["q"].T, out=saved.queries[here])
        self.ops.rotate(queries, cos, sin, self.heads.kv_heads * self.heads.group, queries)
        attended = saved.attended[here]
        saved.lse.append(
            self.ops.attend(
                queries,
                saved.first_kv,
                saved.own_kv,
                steps.own_index[k],
                steps.first[k],
                steps.place[k],
                self.heads,
                attended,
            )
        )
        middle.addmm_(attended, matrix["o"].T)
        activated = self._mlp(saved, here)
        torch.addmm(middle, activated, matrix["down"].T, out=saved.hidden[here])

    def _mlp(self, saved: Saved, here: slice) -> torch.Tensor:
        """Compute what the MLP's last matrix reads, from the state between attention and MLP."""
        mlp = self._mlp_rows(here)
        normed, activated = saved.normed_middle[mlp], saved.activated[mlp]
        self.ops.rms(saved.middle[here], self.weights.vector[_POST], self.eps, normed)
        gate_up = torch.mm(normed, self.weights.matrix["gate_up"].T, out=saved.gate_up[mlp])
        self.ops.swiglu(gate_up, activated)
        return activated

    def _mlp_rows(self, here: slice) -> slice:
        """Where the MLP's activations of a step lie: all steps share one place if they are not kept."""
        return slice(0, here.stop - here.start) if self.recompute else here

    def _hold_to_teacher(
        self,
        saved: Saved,
        here: slice,
        targets: TeacherTargets,
        index: torch.Tensor,
        weight: float,
        loss: LossKind,
        with_gradients: bool,
        row_losses: torch.Tensor,
    ) -> torch.Tensor:
        """Write the rows' losses and the gradient of the normed state; return the argmax of each row."""
        head = self.weights.matrix["head"]
        hidden = saved.hidden[here]
        normed = saved.carried[here] if self.draft.config.norm_output else torch.empty_like(hidden)
        self.ops.rms(hidden, self.weights.vector[_FINAL], self.eps, normed)
        num_chunks = -(-len(normed) // _HEAD_ROWS)
        best = []
        done = 0
        for chunk, of_chunk in zip(normed.chunk(num_chunks), index.chunk(num_chunks), strict=True):
            logits = chunk @ head.T  # (r, W)
            values, argmax = self.ops.loss_and_gradient_(
                logits, targets, of_chunk, weight, loss, with_gradients
            )
            row_losses[done : done + len(chunk)] = values
            best.append(argmax)
            if with_gradients:
                torch.mm(logits, head, out=saved.grad_normed[here][done : done + len(chunk)])
                if self.train_head:
                    self.weights.add("head", logits, chunk)
            done += len(chunk)
        return torch.cat(best)

    def _backward(self, batch: PackedBatch[RowPlan], steps: Steps, saved: Saved) -> None:
        """Walk the steps backwards; what a step no longer needs becomes its gradient."""
        weights, matrix, vector, plan = self.weights, self.weights.matrix, self.weights.vector, batch.plan
        grad_first_kv = torch.zeros_like(saved.first_kv, dtype=torch.float32)
        grad_own_kv = torch.zeros_like(saved.own_kv, dtype=torch.float32)
        grad_entering: torch.Tensor | None = None  # of the state that enters step k + 1
        grad_mixed = grad_first = saved.first_mixed
        for k in reversed(range(len(steps.rows))):
            here = steps.rows[k]
            # grad_normed becomes the gradient of the state that leaves the step.
            leaving = saved.grad_normed[here]
            went_on = None  # each row's place among the rows of the next step
            if grad_entering is not None and self.draft.config.norm_output:
                leaving[plan.keep[k + 1]] += grad_entering  # it entered behind the norm
                grad_entering = None
            if grad_entering is not None:
                went_on = torch.full_like(plan.rows[k], -1)
                went_on[plan.keep[k + 1]] = torch.arange(len(grad_entering), device=went_on.device)
            of_weight = self.ops.rms_backward(
                leaving,
                saved.hidden[here],
                vector[_FINAL],
                self.eps,
                residual=grad_entering,
                residual_index=went_on,
                out=leaving,
            )
            weights.add_vector(_FINAL, of_weight)

            if self.recompute:
                weights.add("down", leaving, self._mlp(saved, here))
            mlp = self._mlp_rows(here)
            grad_activated = leaving @ matrix["down"]
            gate_up = saved.gate_up[mlp]
            self.ops.swiglu_backward_(grad_activated, gate_up)
            del grad_activated
            if self.recompute:
                weights.add("gate_up", gate_up, saved.normed_middle[mlp])
            grad_middle = saved.middle[here]
            of_weight = self.ops.rms_backward(
                gate_up @ matrix["gate_up"],
                grad_middle,
                vector[_POST],
                self.eps,
                residual=leaving,
                out=grad_middle,
            )
            weights.add_vector(_POST, of_weight)

            cos, sin = saved.turns[k]
            queries = saved.queries[here]
            grad_queries = self.ops.attend_backward(
                grad_middle @ matrix["o"],
                saved.attended[here],
                saved.lse[k],
                queries,
                saved.first_kv,
                saved.own_kv,
                steps.own_index[k],
                steps.first[k],
                steps.place[k],
                self.heads,
                grad_first_kv,
                grad_own_kv,
            )
            self.ops.rotate(grad_queries, cos, -sin, self.heads.kv_heads * self.heads.group, queries)
            grad_mixed = queries @ matrix["q"]
            if k == 0:
                grad_first = grad_middle
                break
            own = steps.own[k]
            own_kv = saved.own_kv[own]
            self.ops.rotate(grad_own_kv[own], cos, -sin, self.heads.kv_heads, own_kv)
            grad_mixed.addmm_(own_kv, matrix["kv"])
            grad_entering = torch.empty_like(grad_middle)
            self._mix_backward(
                grad_mixed,
                steps.read[k],
                saved.carried[steps.rows[k - 1]],
                plan.keep[k],
                grad_middle,
                grad_entering,
            )
        if not steps.rows:
            return

        if not self.recompute:
            weights.add("gate_up", saved.gate_up, saved.normed_middle)
        weights.complete("gate_up")
        if not self.recompute:
            weights.add("down", saved.grad_normed, saved.activated)
        weights.complete("down")
        weights.add("o", saved.middle, saved.attended)
        weights.complete("o")
        weights.add("q", saved.queries, saved.mixed)
        weights.complete("q")

        cos, sin = self._turns(batch.positions[plan.keys])
        first_kv = saved.first_kv
        self.ops.rotate(grad_first_kv, cos, -sin, self.heads.kv_heads, first_kv)
        grad_first_mixed = first_kv @ matrix["kv"]
        grad_first_mixed[plan.key_places[0]] += grad_mixed
        grad_hidden = torch.zeros_like(saved.first_hidden)
        grad_hidden[plan.key_places[0]] = grad_first
        self._mix_backward(
            grad_first_mixed, batch.tokens[plan.keys + 1], saved.first_hidden, None, grad_hidden, grad_hidden
        )
        grad_fused = grad_hidden.new_zeros(len(batch.tokens), grad_hidden.shape[1])
        grad_fused[plan.keys] = grad_hidden

        weights.add("fc", grad_fused, saved.fused_input)
        if self.draft.config.fc_norm:
            grad_input = grad_fused @ matrix["fc"]
            for name, rows, columns in self._aux_layers(batch.aux):
                flat = batch.aux.flatten(0, 1)
                of_weight = self.ops.rms_backward(
                    grad_input[:, columns], flat, vector[name], self.eps, index=rows
                )
                weights.add_vector(name, of_weight)
        weights.complete("fc")
        weights.add("kv", first_kv, saved.first_mixed)
        if steps.num_own:
            weights.add("kv", saved.own_kv, saved.mixed[steps.rows[0].stop :])
        weights.complete("kv")

    def _fused_input(self, aux: torch.Tensor) -> torch.Tensor:
        """Return what ``fc`` reads [N, A D]: the aux layers, normed where the draft has norms for them."""
        if not self.draft.config.fc_norm:
            return aux.flatten(1)
        out = torch.empty_like(aux.flatten(1))
        for name, rows, columns in self._aux_layers(aux):
            weight = self.weights.vector[name]
            self.ops.rms(aux.flatten(0, 1), weight, self.eps, out[:, columns], index=rows)
        return out

    def _aux_layers(self, aux: torch.Tensor) -> Iterator[tuple[str, torch.Tensor, slice]]:
        """Yield each aux layer's norm, its rows in the flat aux states, its columns in ``fc``'s input."""
        num_tokens, num_layers, width = aux.shape
        first = torch.arange(num_tokens, device=aux.device) * num_layers
        for layer in range(num_layers):
            yield f"fc_norm.{layer}.weight", first + layer, slice(layer * width, (layer + 1) * width)

    def _mix(
        self,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        index: torch.Tensor,
        mixed: torch.Tensor,
        entering: torch.Tensor,
    ) -> None:
        """Write rows ``index`` of ``hidden`` to ``entering``, and the layer's input of them to ``mixed``."""
        vector, width = self.weights.vector, entering.shape[1]
        embedding = self.draft.embed_tokens.weight
        self.ops.rms(embedding, vector[_EMBED], self.eps, mixed[:, :width], index=tokens)
        self.ops.rms(hidden, vector[_HIDDEN], self.eps, mixed[:, width:], index=index, copy=entering)

    def _mix_backward(
        self,
        grad: torch.Tensor,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        index: torch.Tensor | None,
        residual: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Write the gradient of the rows that ``_mix`` read, plus ``residual``, to ``out``."""
        weights, width = self.weights, out.shape[1]
        embedding = self.draft.embed_tokens.weight
        of_token = self.ops.rms_backward(
            grad[:, :width], embedding, weights.vector[_EMBED], self.eps, index=tokens
        )
        of_hidden = self.ops.rms_backward(
            grad[:, width:],
            hidden,
            weights.vector[_HIDDEN],
            self.eps,
            index=index,
            residual=residual,
            out=out,
        )
        weights.add_vector(_EMBED, of_token)
        weights.add_vector(_HIDDEN, of_hidden)

    def _turns(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin [R, head_dim] in fp32."""
        like = torch.empty(0, dtype=torch.float32, device=positions.device)
        cos, sin = self.draft.rotary.embedding(like, positions[None])
        return cos[0], sin[0]
