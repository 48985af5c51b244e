"""Capture in the worker by forward hooks: the way in for versions and models without the facility.

It is also the independent probe_output of the native way. Rows belong to requests by the scheduler's own
bookkeeping, and that is checked against the token ids and positions the model was really given.
Eager mode only: in a compiled model hooks see nothing, without an error.
"""

import functools
import inspect
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from eyas.engines.vllm.state_transfer import (
    NAME_KEY,
    WITNESS_KEY,
    StagedStates,
    hand_over,
    to_pinned,
    write_error,
)
from eyas.row_stats import measure_rows

_NUM_WRITERS = 4


@dataclass
class _Request:
    """The rows captured of one prompt so far."""

    states: torch.Tensor  # (T, L, D)
    figures: torch.Tensor  # (T, L, 4)
    filled: torch.Tensor  # (T,)


class StreamHooks:
    """Keeps the residual stream at ``layer_ids`` of each prompt and writes it when it is complete.

    Only forward passes inside ``execute_model`` with scheduled tokens count; warm-up, profiling and
    padding go through ``_dummy_run`` or lie beyond the scheduled rows and are never read.
    """

    def __init__(
        self, runner: Any, rank: int, num_layers: int, layer_ids: Sequence[int], folder: Path
    ) -> None:
        if not hasattr(runner, "input_batch") or not hasattr(runner, "requests"):
            raise RuntimeError("this model runner keeps no input_batch; set VLLM_USE_V2_MODEL_RUNNER=0")
        self.runner, self.rank, self.folder = runner, rank, folder
        self.layer_ids = tuple(sorted(set(layer_ids)))
        self._seen: dict[int, torch.Tensor] | None = None  # None: this forward pass does not count
        self._fed: dict[str, torch.Tensor] = {}
        self._open: dict[str, _Request] = {}
        self._written: set[str] = set()
        self._writers = ThreadPoolExecutor(_NUM_WRITERS, "eyas-stage")
        self._writes: list[Future[None]] = []
        owner, layers = find_layers(_unwrapped(runner.model), num_layers)
        owner.register_forward_pre_hook(self._keep_fed, with_kwargs=True)
        for layer_id in self.layer_ids:
            if layer_id == 0:
                layers[0].register_forward_pre_hook(self._keep_input, with_kwargs=True)
            else:
                layers[layer_id - 1].register_forward_hook(self._keep_output(layer_id))
        self._execute, self._dummy = runner.execute_model, runner._dummy_run
        runner.execute_model, runner._dummy_run = self._execute_and_collect, self._ignore_dummy

    # ------------------------------------------------------------- around the runner
    def _execute_and_collect(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        for write in [w for w in self._writes if w.done()]:
            self._writes.remove(write)
            write.result()  # neither states nor a reason could be written
        for req_id in scheduler_output.finished_req_ids:
            self._open.pop(req_id, None)
            self._written.discard(req_id)
        self._seen = {} if scheduler_output.total_num_scheduled_tokens else None
        self._fed = {}
        try:
            result = self._execute(scheduler_output, *args, **kwargs)
            if self._seen is not None:
                self._collect(scheduler_output.num_scheduled_tokens)
        finally:
            self._seen = None
        return result

    def _ignore_dummy(self, *args: Any, **kwargs: Any) -> Any:
        seen, self._seen = self._seen, None
        try:
            return self._dummy(*args, **kwargs)
        finally:
            self._seen = seen

    # ------------------------------------------------------------- inside the model
    def _keep_fed(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._seen is not None:
            given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
            for name in ("input_ids", "positions"):
                if given.get(name) is not None:
                    self._fed[name] = given[name]

    def _keep_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._seen is not None:
            # Signatures differ (DeepSeek-V2 adds llama_4_scaling, some have no residual): go by name.
            given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
            self._seen[0] = stream_of((given["hidden_states"], given.get("residual")))

    def _keep_output(self, layer_id: int) -> Any:
        def keep(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if self._seen is not None:
                self._seen[layer_id] = stream_of(output)

        return keep

    # ------------------------------------------------------------- after a forward pass
    def _collect(self, num_scheduled: dict[str, int]) -> None:
        batch = self.runner.input_batch
        assert self._seen is not None
        missing = [i for i in self.layer_ids if i not in self._seen]
        if missing:
            reason = f"hooks saw nothing at layer {missing[0]}: is the model compiled?"
            for req_id in filter(self._is_named, num_scheduled):
                self._refuse(req_id, reason)
            return
        # Rows beyond those scheduled are padding.
        seen = [self._seen[i][: sum(num_scheduled.values())] for i in self.layer_ids]
        on_device = torch.stack(seen, dim=1)  # (tokens, L, D)
        # Positions of several kinds (M-RoPE) are not compared.
        given = {name: fed for name, fed in self._fed.items() if name == "input_ids" or fed.ndim == 1}
        states, figures, *fed = _to_host([on_device, measure_rows(on_device), *given.values()])
        self._fed = dict(zip(given, fed, strict=True))
        start = 0
        for place, req_id in enumerate(batch.req_ids):
            num_rows = num_scheduled[req_id]
            first = int(batch.num_computed_tokens_cpu[place])
            self._take(req_id, first, slice(start, start + num_rows), states, figures)
            start += num_rows

    def _take(
        self, req_id: str, first: int, rows: slice, states: torch.Tensor, figures: torch.Tensor
    ) -> None:
        """Put the rows of one request's chunk where they belong; write it out when it is whole."""
        if not self._is_named(req_id):
            return
        prompt = torch.tensor(self.runner.requests[req_id].prompt_token_ids)
        stop = min(first + rows.stop - rows.start, len(prompt))  # rows beyond are generated tokens
        if req_id in self._written or first >= len(prompt):
            return
        rows = slice(rows.start, rows.start + stop - first)
        trouble = self._misfed(prompt, first, stop, rows)
        if trouble:
            self._refuse(req_id, trouble)
            return
        request = self._open.get(req_id)
        if request is None:
            request = _Request(
                torch.empty(len(prompt), *states.shape[1:], dtype=states.dtype),
                torch.empty(len(prompt), *figures.shape[1:]),
                torch.zeros(len(prompt), dtype=torch.bool),
            )
            self._open[req_id] = request
        request.states[first:stop] = states[rows]
        request.figures[first:stop] = figures[rows]
        request.filled[first:stop] = True
        if stop == len(prompt):
            self._finish(req_id, request, prompt)

    def _misfed(self, prompt: torch.Tensor, first: int, stop: int, rows: slice) -> str | None:
        ids, positions = self._fed.get("input_ids"), self._fed.get("positions")
        if ids is not None and not torch.equal(ids[rows].long(), prompt[first:stop]):
            return f"rows {first} to {stop} were computed from other tokens than the request's"
        if positions is not None and not torch.equal(positions[rows].long(), torch.arange(first, stop)):
            return f"rows {first} to {stop} were computed at other positions"
        return None

    def _finish(self, req_id: str, request: _Request, prompt: torch.Tensor) -> None:
        path = self._path(req_id)
        if not request.filled.all():
            lost = int((~request.filled).sum())
            self._refuse(req_id, f"{lost} of {len(prompt)} rows were never computed (prefix caching?)")
            return
        self._written.add(req_id)
        del self._open[req_id]
        probe_output = bool(self.runner.requests[req_id].sampling_params.extra_args.get(WITNESS_KEY))
        make = functools.partial(StagedStates.split, request.states, prompt, self.layer_ids, request.figures)
        self._writes.append(self._writers.submit(hand_over, path, self.rank, probe_output, make))

    def _refuse(self, req_id: str, reason: str) -> None:
        if req_id in self._written:
            return
        self._written.add(req_id)
        self._open.pop(req_id, None)
        if self.rank == 0:
            write_error(self._path(req_id), reason)

    def _is_named(self, req_id: str) -> bool:
        """Whether a request's states are asked for; other requests are answered only."""
        return NAME_KEY in (self.runner.requests[req_id].sampling_params.extra_args or {})

    def _path(self, req_id: str) -> Path:
        return self.folder / self.runner.requests[req_id].sampling_params.extra_args[NAME_KEY]


def _to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy all of a step at once: each copy from a GPU that is waited for costs as much as a large one."""
    copies = [to_pinned(t) if t.is_cuda else t for t in tensors]
    if any(t.is_cuda for t in tensors):
        torch.cuda.current_stream().synchronize()
    return copies


def stream_of(output: Any) -> torch.Tensor:
    """Return the residual stream of what a layer returns: a tensor, or (hidden, residual) to be added."""
    if isinstance(output, torch.Tensor):
        return output.clone()  # the next layer may work in place
    hidden, residual = output[0], output[1] if len(output) > 1 else None
    return hidden.clone() if residual is None else hidden + residual


def find_layers(model: nn.Module, num_layers: int) -> tuple[nn.Module, nn.ModuleList]:
    """Return the module that owns the decoder layers, and the layers.

    Raises: LookupError when there is none or more than one list of that length named ``layers``.
    """
    found = [
        (owner, child)
        for owner in model.modules()
        for name, child in owner.named_children()
        if name == "layers" and isinstance(child, nn.ModuleList) and len(child) == num_layers
    ]
    if len(found) != 1:
        raise LookupError(f"{type(model).__name__} has {len(found)} lists of {num_layers} layers, expected 1")
    return found[0]


def _unwrapped(model: Any) -> nn.Module:
    """Return the model inside vLLM's graph and micro-batch wrappers."""
    while not isinstance(model, nn.Module) or hasattr(model, "runnable"):
        model = model.runnable
    return model
