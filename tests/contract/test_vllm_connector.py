"""What the connector copies together, in the workers, is written request by request: each its own rows."""

import random
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="vllm is not installed")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's own
    from eyas.engines.vllm import connector
    from eyas.engines.vllm.connector import EyasConnector
from eyas.engines.vllm.state_transfer import WITNESS_PREFIX, layer_digests, take_digests, take_states

pytestmark = pytest.mark.filterwarnings("ignore")

NUM_BLOCKS, NUM_LAYERS, BLOCK, WIDTH = 120, 4, 16, 8
ROW_BYTES = NUM_LAYERS * WIDTH * 4
GO_ON = threading.Event()
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]


class Worker(EyasConnector):
    """The workers' half alone, beside a cache of random rows."""

    def __init__(self, device: str, rank: int) -> None:
        self._kv_cache = torch.randn(NUM_BLOCKS, NUM_LAYERS, BLOCK, WIDTH, device=device)
        self._block_size, self._row_bytes, self._rank = BLOCK, ROW_BYTES, rank
        self._layer_ids = (1, 2, 3, 4)
        self._copying: dict[frozenset[str], Callable[[], bool]] = {}
        self._copy_stream = self._fatal = None
        self._executor = ThreadPoolExecutor(4)
        self.pending: list[Request] = []

    def has_connector_metadata(self) -> bool:
        return True

    def _get_connector_metadata(self) -> SimpleNamespace:
        pending, self.pending = self.pending, []
        return SimpleNamespace(pending_saves=pending)

    def rows(self, request: "Request") -> torch.Tensor:
        assert self._kv_cache is not None
        cache = self._kv_cache.cpu()
        places = [divmod(t, BLOCK) for t in range(len(request.token_ids))]
        return torch.stack([cache[request.block_ids[block], :, slot] for block, slot in places])


@dataclass
class Request:
    req_id: str
    filename: str
    token_ids: torch.Tensor
    block_ids: list[int]


def requests(folder: Path, lengths: list[int]) -> list[Request]:
    blocks = random.Random(0).sample(range(NUM_BLOCKS), NUM_BLOCKS)
    made = []
    for i, length in enumerate(lengths):
        own = [blocks.pop() for _ in range(-(-length // BLOCK))]
        name = f"{WITNESS_PREFIX if i % 4 == 3 else 'sample-'}{i}"
        made.append(Request(f"r{i}", str(folder / name), torch.randint(0, 99, (length,)), own))
    return made


def saved(worker: Worker, pending: list[Request]) -> set[str]:
    """Let the worker save, and ask until it says that all blocks have been read."""
    worker.pending = list(pending)
    done: set[str] = set()
    deadline = time.monotonic() + 20
    while len(done) < len(pending) and time.monotonic() < deadline:
        done |= worker.get_finished(set())[0] or set()
    return done


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows_together", [1, 70, 10_000])
def test_each_request_gets_its_own_rows_however_many_are_copied_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_together: int, device: str
) -> None:
    monkeypatch.setattr(connector, "_COPY_BYTES", rows_together * ROW_BYTES)
    worker = Worker(device, rank=0)
    pending = requests(tmp_path, [1, 16, 17, 40, 3, 64, 100, 5, 33, 2])
    assert saved(worker, pending) == {p.req_id for p in pending}
    for request in pending:
        path, wanted = Path(request.filename), worker.rows(request)
        found = take_states(path, 10, GO_ON)
        assert torch.equal(found.states, wanted)
        assert torch.equal(found.token_ids, request.token_ids)
        assert torch.equal(found.figures[..., 1], wanted.amax(-1))
        if path.name.startswith(WITNESS_PREFIX):
            assert take_digests(path, 0, 10, GO_ON) == layer_digests(wanted)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("device", DEVICES)
def test_a_further_rank_checksums_witnesses_and_writes_nothing(tmp_path: Path, device: str) -> None:
    worker = Worker(device, rank=1)
    pending = requests(tmp_path, [20, 5, 33, 40, 7])
    assert saved(worker, pending) == {p.req_id for p in pending}
    probe_output = Path(pending[3].filename)
    assert take_digests(probe_output, 1, 10, GO_ON) == layer_digests(worker.rows(pending[3]))
    worker._executor.shutdown()
    assert list(tmp_path.iterdir()) == []


def test_a_copy_that_fails_is_a_reason_for_each_of_its_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise MemoryError("no room for a copy")

    monkeypatch.setattr(connector.StagedStates, "split", fail)
    pending = requests(tmp_path, [20, 5])
    assert saved(Worker("cpu", rank=0), pending) == {"r0", "r1"}
    for request in pending:
        with pytest.raises(Exception, match="no room for a copy"):
            take_states(Path(request.filename), 10, GO_ON)
