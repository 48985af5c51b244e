"""Our KV connector for vLLM's ``extract_hidden_states``: loaded by vLLM in each of its workers by name.

It takes the scheduler's half from vLLM's example connector and replaces the workers' half, which
copies through CUDA streams only, logs a failed write and goes on, and has no checksum.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as stock
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from eyas.engines.vllm.state_transfer import (
    FACTS_KEY,
    NAME_KEY,
    STAGING_FORMAT,
    WITNESS_PREFIX,
    StagedStates,
    hand_over,
    to_pinned,
)

# Requests are copied together until they are so large: an operation takes as long for many as for one.
_COPY_BYTES = 64 << 20
# What waits for one request's states of a copy, and what says whether all have been read.
_Copy = tuple[Callable[[int], StagedStates], Callable[[], bool]]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")  # a name alone: no folder of the asker's choice


class EyasConnector(stock.ExampleHiddenStatesConnector):
    """Rank 0 writes the states of requests that name a file; every rank checksums those of a probe_output.

    Other requests, such as the answers that a server gives besides, leave nothing.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        config = vllm_config.speculative_config.draft_model_config.hf_config
        # vLLM returns the layers ascending and each once, whatever was asked for.
        self._layer_ids = tuple(sorted(set(config.eagle_aux_hidden_state_layer_ids)))
        self._facts = self._describe(vllm_config)
        Path(self._storage_path).mkdir(parents=True, exist_ok=True)
        self._rank = 0
        hidden_size, dtype = vllm_config.model_config.get_hidden_size(), vllm_config.model_config.dtype
        self._row_bytes = len(self._layer_ids) * hidden_size * dtype.itemsize
        self._copying: dict[frozenset[str], Callable[[], bool]] = {}  # by request ids
        self._fatal: BaseException | None = None

    def get_finished_count(self) -> int | None:
        # Every rank reports, so blocks are freed only when all ranks have read them.
        return None

    # ------------------------------------------------------------- in the scheduler
    def build_connector_meta(self, scheduler_output: Any) -> Any:
        meta = super().build_connector_meta(scheduler_output)
        for request in scheduler_output.scheduled_new_reqs:
            name = ((request.sampling_params and request.sampling_params.extra_args) or {}).get(NAME_KEY)
            if isinstance(name, str) and _NAME.fullmatch(name):
                self._request_filenames[request.req_id] = str(Path(self._storage_path) / name)
            else:
                self._request_filenames.pop(request.req_id, None)
        return meta

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        if request.num_computed_tokens < request.num_prompt_tokens:
            # Aborted in the middle of its prompt: the rest of its blocks holds other requests' states.
            self._request_filenames.pop(request.request_id, None)
            return False, None
        delayed, params = super().request_finished(request, block_ids)
        return delayed, {**params, FACTS_KEY: self._facts} if params else None

    def _describe(self, config: Any) -> dict[str, Any]:
        """Say what this engine is, for a client that did not start it."""
        text = config.model_config.hf_text_config
        return {
            "vllm": vllm.__version__,
            "staging": STAGING_FORMAT,
            "layer_ids": list(self._layer_ids),
            "num_layers": text.num_hidden_layers,
            "hidden_size": config.model_config.get_hidden_size(),
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "num_ranks": config.parallel_config.tensor_parallel_size,
            "prefix_caching": bool(config.cache_config.enable_prefix_caching),
            "target": self._kv_transfer_config.get_from_extra_config("target", ""),
        }

    # ------------------------------------------------------------- in each worker
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        self._rank = get_tensor_model_parallel_rank()

    def wait_for_save(self) -> None:
        pass

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._fatal is not None:
            raise RuntimeError("hidden states could not be written, nor the reason why") from self._fatal
        done: set[str] = set()
        if self.has_connector_metadata():
            pending = getattr(self._get_connector_metadata(), "pending_saves", ())
            mine = [p for p in pending if self._rank == 0 or _is_witness(p.filename)]
            done.update({p.req_id for p in pending} - {p.req_id for p in mine})
            for group in self._grouped(mine):
                self._copying[frozenset(p.req_id for p in group)] = self._save(group)
        for group_ids in [ids for ids, is_copied in self._copying.items() if is_copied()]:
            del self._copying[group_ids]
            done |= group_ids
        return done or None, None

    def _grouped(self, pending: list[Any]) -> Iterator[list[Any]]:
        """Part what is to be saved into groups that are copied at once."""
        group: list[Any] = []
        num_rows = 0
        for one in pending:
            group.append(one)
            num_rows += len(one.token_ids)
            if num_rows * self._row_bytes >= _COPY_BYTES:
                yield group
                group, num_rows = [], 0
        if group:
            yield group

    def _save(self, group: list[Any]) -> Callable[[], bool]:
        """Start copying and writing requests; return how to ask whether their blocks have been read."""
        assert self._kv_cache is not None
        lengths = [len(p.token_ids) for p in group]
        slots = torch.cat([self._slots(p.block_ids)[:n] for p, n in zip(group, lengths, strict=True)])
        token_ids = torch.cat([p.token_ids for p in group])
        copy = self._copy_from_gpu if self._kv_cache.is_cuda else self._copy_on_cpu
        part, is_copied = copy(self._kv_cache, slots, token_ids, lengths)
        for place, pending in enumerate(group):
            self._executor.submit(self._write, Path(pending.filename), functools.partial(part, place))
        return is_copied

    def _slots(self, block_ids: list[int]) -> torch.Tensor:
        blocks = torch.tensor(block_ids, dtype=torch.long)[:, None]
        return (blocks * self._block_size + torch.arange(self._block_size)).flatten()

    def _copy_on_cpu(
        self, cache: torch.Tensor, slots: torch.Tensor, token_ids: torch.Tensor, lengths: list[int]
    ) -> _Copy:
        states = stock.extract_from_kv_cache(cache, slots, len(slots))
        split = StagedStates.split
        parts = self._executor.submit(lambda: split(states, token_ids, self._layer_ids).parts(lengths))
        return lambda place: parts.result()[place], lambda: True

    def _copy_from_gpu(
        self, cache: torch.Tensor, slots: torch.Tensor, token_ids: torch.Tensor, lengths: list[int]
    ) -> _Copy:
        stream = self._get_copy_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # Pinned, or the copy would wait for the forward pass that was just launched.
            on_device_slots = slots.pin_memory().to(cache.device, non_blocking=True)
            states = stock.extract_from_kv_cache(cache, on_device_slots, len(slots))
            on_device = StagedStates.split(states, token_ids, self._layer_ids)
            staged = dataclasses.replace(
                on_device,
                lower=to_pinned(on_device.lower),
                last=to_pinned(on_device.last),
                figures=to_pinned(on_device.figures),
            )
        event = torch.cuda.Event(blocking=True)  # threads that spin would take the cores of those that write
        event.record(stream)
        parts = staged.parts(lengths)

        def part(place: int) -> StagedStates:
            event.synchronize()
            return parts[place]

        return part, event.query

    def _write(self, path: Path, make: Callable[[], StagedStates]) -> None:
        try:
            hand_over(path, self._rank, _is_witness(path), make)
        except BaseException as error:
            self._fatal = error


def _is_witness(path: Path | str) -> bool:
    return Path(path).name.startswith(WITNESS_PREFIX)
