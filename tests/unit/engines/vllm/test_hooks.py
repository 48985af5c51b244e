"""Hooks over a model runner that behaves as vLLM's does: flattened batches, chunks, warm-up, padding."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from eyas.engines.vllm.hooks import StreamHooks, find_layers, stream_of
from eyas.engines.vllm.state_transfer import take_states
from eyas.errors import ContractError

WIDTH, NUM_LAYERS = 4, 3
POISON = 1e9


class ResidualLayer(nn.Module):
    """A layer as DeepSeek-V2's: positions, hidden states, residual, and a further argument."""

    def forward(
        self, positions: Any, hidden_states: Any, residual: Any, llama_4_scaling: Any = None
    ) -> tuple[Any, Any]:
        residual = hidden_states if residual is None else hidden_states + residual
        return residual * 0.5, residual


class PlainLayer(nn.Module):
    def forward(self, hidden_states: Any) -> Any:
        return hidden_states * 1.5


class Decoder(nn.Module):
    def __init__(self, residual: bool) -> None:
        super().__init__()
        self.residual = residual
        self.layers = nn.ModuleList(ResidualLayer() if residual else PlainLayer() for _ in range(NUM_LAYERS))

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        # A state tells its token and its position, so that any mix-up shows.
        hidden = (input_ids[:, None] * 1000.0 + positions[:, None]).expand(-1, WIDTH)
        residual = None
        for layer in self.layers:
            if self.residual:
                hidden, residual = layer(positions, hidden, residual, llama_4_scaling=None)
            else:
                hidden = layer(hidden)
        return hidden


def expected(ids: list[int], residual: bool) -> torch.Tensor:
    """Return the streams [T, NUM_LAYERS + 1, WIDTH]."""
    tokens, positions = torch.tensor(ids), torch.arange(len(ids))
    stream = (tokens[:, None] * 1000.0 + positions[:, None]).expand(-1, WIDTH)
    streams = [stream]
    for _ in range(NUM_LAYERS):
        stream = stream * 1.5
        streams.append(stream)
    return torch.stack(streams, dim=1)


class Runner:
    """Schedules what it is told; every batch is padded with poison, and dummy runs are nothing else."""

    def __init__(self, residual: bool = True) -> None:
        self.model = nn.Module()
        self.model.model = Decoder(residual)
        self.requests: dict[str, Any] = {}
        self.input_batch = SimpleNamespace(req_ids=[], num_computed_tokens_cpu=np.zeros(8, dtype=int))
        self.mix_up = False

    def add(self, req_id: str, ids: list[int]) -> None:
        params = SimpleNamespace(extra_args={"eyas_file": f"file-{req_id}", "eyas_witness": False})
        self.requests[req_id] = SimpleNamespace(prompt_token_ids=ids, sampling_params=params)

    def execute_model(self, scheduler_output: Any) -> str:
        if not scheduler_output.total_num_scheduled_tokens:
            self._dummy_run(4)
            return "nothing"
        ids, positions = [], []
        for place, req_id in enumerate(self.input_batch.req_ids):
            first = self.input_batch.num_computed_tokens_cpu[place]
            num = scheduler_output.num_scheduled_tokens[req_id]
            tokens = [*self.requests[req_id].prompt_token_ids, 99, 99]
            ids += tokens[first : first + num]
            positions += range(first, first + num)
        if self.mix_up:
            ids = ids[::-1]
        padding = [int(POISON)] * 5
        self.model.model(torch.tensor(ids + padding), torch.tensor(positions + padding))
        return "ran"

    def _dummy_run(self, num: int) -> None:
        poison = torch.full((num,), int(POISON))
        self.model.model(input_ids=poison, positions=poison)

    def step(self, scheduled: dict[str, tuple[int, int]], finished: tuple[str, ...] = ()) -> None:
        """Run rows first to first + num of each request, in this order in the batch."""
        self.input_batch.req_ids = list(scheduled)
        for place, (first, _) in enumerate(scheduled.values()):
            self.input_batch.num_computed_tokens_cpu[place] = first
        num = {req_id: n for req_id, (_, n) in scheduled.items()}
        self.execute_model(
            SimpleNamespace(
                finished_req_ids=set(finished),
                num_scheduled_tokens=num,
                total_num_scheduled_tokens=sum(num.values()),
            )
        )


def hooked(tmp_path: Path, residual: bool = True) -> Runner:
    runner = Runner(residual)
    StreamHooks(runner, 0, NUM_LAYERS, range(NUM_LAYERS + 1), tmp_path)
    return runner


@pytest.mark.parametrize("residual", [True, False])
def test_chunks_and_mixed_batches_give_each_request_its_own_rows(tmp_path: Path, residual: bool) -> None:
    runner = hooked(tmp_path, residual)
    a, b = [1, 2, 3, 4, 5, 6, 7], [9, 8, 7]
    runner.add("a", a)
    runner.add("b", b)
    runner.step({"a": (0, 4)})
    runner.step({"b": (0, 3), "a": (4, 2)})
    runner.step({"a": (6, 1), "b": (3, 1)})  # b generates, a ends its prompt
    for name, ids in (("a", a), ("b", b)):
        found = take_states(tmp_path / f"file-{name}", 1, threading.Event())
        torch.testing.assert_close(found.states, expected(ids, residual))
        assert found.token_ids.tolist() == ids


def test_warm_up_padding_and_dummy_batches_never_reach_the_data(tmp_path: Path) -> None:
    runner = hooked(tmp_path)
    ids = [1, 2, 3, 4]
    runner.add("a", ids)
    runner._dummy_run(8192)
    runner.step({"a": (0, 2)})
    runner._dummy_run(32)
    runner.step({})
    runner.step({"a": (2, 2)})
    found = take_states(tmp_path / "file-a", 1, threading.Event()).states
    torch.testing.assert_close(found, expected(ids, True))
    assert found.max() < POISON


def test_a_preempted_request_is_captured_from_its_start_again(tmp_path: Path) -> None:
    runner = hooked(tmp_path)
    ids = [5, 6, 7, 8]
    runner.add("a", ids)
    runner.step({"a": (0, 3)})
    runner.step({"a": (0, 2)})  # its cache was taken away
    runner.step({"a": (2, 2)})
    torch.testing.assert_close(
        take_states(tmp_path / "file-a", 1, threading.Event()).states, expected(ids, True)
    )


def test_rows_computed_from_other_tokens_are_refused(tmp_path: Path) -> None:
    runner = hooked(tmp_path)
    runner.add("a", [1, 2, 3])
    runner.mix_up = True
    runner.step({"a": (0, 3)})
    with pytest.raises(ContractError, match="computed from other tokens than the request's"):
        take_states(tmp_path / "file-a", 1, threading.Event())


def test_rows_that_were_never_computed_are_refused(tmp_path: Path) -> None:
    runner = hooked(tmp_path)
    runner.add("a", [1, 2, 3])
    runner.step({"a": (2, 1)})  # the first two came from a prefix cache
    with pytest.raises(ContractError, match="2 of 3 rows were never computed"):
        take_states(tmp_path / "file-a", 1, threading.Event())


def test_a_model_whose_layers_hooks_cannot_see_is_refused(tmp_path: Path) -> None:
    runner = hooked(tmp_path)
    runner.add("a", [1, 2, 3])
    runner.model.model.layers[1]._forward_hooks.clear()  # what compiling the model amounts to
    runner.step({"a": (0, 3)})
    with pytest.raises(ContractError, match="hooks saw nothing at layer 2: is the model compiled"):
        take_states(tmp_path / "file-a", 1, threading.Event())


def test_an_aborted_request_leaves_nothing(tmp_path: Path) -> None:
    runner = hooked(tmp_path)
    runner.add("a", [1, 2, 3])
    runner.add("b", [4, 5])
    runner.step({"a": (0, 2)})
    runner.step({"b": (0, 2)}, finished=("a",))
    take_states(tmp_path / "file-b", 1, threading.Event())
    assert list(tmp_path.iterdir()) == []


def test_a_worker_that_can_write_neither_states_nor_a_reason_stops(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    runner = hooked(folder)
    runner.add("a", [1, 2, 3])
    folder.rmdir()
    runner.step({"a": (0, 3)})
    time.sleep(0.5)  # a thread writes
    with pytest.raises(FileNotFoundError):
        runner.step({"a": (3, 1)})


def test_the_stream_is_the_sum_of_hidden_and_residual() -> None:
    one, two = torch.ones(2, 3), torch.full((2, 3), 2.0)
    assert torch.equal(stream_of((one, two)), one + two)
    assert torch.equal(stream_of((one, None)), one)
    assert torch.equal(stream_of((one,)), one)
    assert torch.equal(stream_of(one), one)


def test_a_model_with_two_lists_of_layers_is_refused() -> None:
    model = nn.Module()
    model.one, model.two = Decoder(True), Decoder(True)
    with pytest.raises(LookupError, match="2 lists of 3 layers"):
        find_layers(model, NUM_LAYERS)
