"""Batches read ahead: packed by threads, copied to a GPU while the step before is still running."""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import chain, islice
from typing import TypeVar

import torch

from eyas.drafters.common.batch import PackedBatch

# Checksums of shards that are opened keep a core busy each.
_READERS = min(8, os.cpu_count() or 1)

Group = TypeVar("Group")


# Runs of the micro-batches of ``steps[first:last]``, in order, each readable until the next one is asked for.
Windows = Callable[[Sequence[Sequence[Sequence[int]]], int, int], Iterable[Sequence[Sequence[int]]]]


def whole(
    steps: Sequence[Sequence[Sequence[int]]], first: int, last: int
) -> Iterable[Sequence[Sequence[int]]]:
    """One run: what is stored can be read at any time."""
    return [list(chain.from_iterable(steps[first:last]))]


def feed(
    load: Callable[[Group], PackedBatch], windows: Iterable[Sequence[Group]], device: torch.device
) -> Generator[PackedBatch, None, None]:
    """Yield ``load`` of each group of each window in order, on ``device``.

    ``load`` packs on the CPU, in pinned memory for a GPU, and runs in threads. A window is asked for when all
    batches of the one before have been trained on.

    Raises: whatever ``load`` raises, when its batch is due.
    """
    for groups in windows:
        with closing(_ahead(load, groups)) as batches:
            if device.type != "cuda":
                yield from (batch.to(device) for batch in batches)
            else:
                yield from _copied(batches, device)


def _copied(
    batches: Generator[PackedBatch, None, None], device: torch.device
) -> Generator[PackedBatch, None, None]:
    """Copy each batch to the GPU, on a stream beside, before the one before it is handed out."""
    side = torch.cuda.Stream(device)
    copied: PackedBatch | None = None
    for packed in batches:
        with torch.cuda.stream(side):
            coming = packed.to(device)
        if copied is not None:
            yield copied
        # From here on the batch belongs to the stream that trains.
        torch.cuda.current_stream(device).wait_stream(side)
        for tensor in coming.tensors():
            tensor.record_stream(torch.cuda.current_stream(device))
        copied = coming
    if copied is not None:
        yield copied


def _ahead(
    load: Callable[[Group], PackedBatch], groups: Sequence[Group]
) -> Generator[PackedBatch, None, None]:
    rest = iter(groups)
    pool = ThreadPoolExecutor(_READERS, thread_name_prefix="feed")
    try:
        queue: deque[Future[PackedBatch]] = deque(pool.submit(load, g) for g in islice(rest, _READERS))
        while queue:
            batch = queue.popleft().result()
            queue.extend(pool.submit(load, g) for g in islice(rest, 1))
            yield batch
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
