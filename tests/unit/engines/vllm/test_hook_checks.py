"""What hooks check of a batch, each check by a batch that only it can refuse."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_hooks import NUM_LAYERS, Runner, expected, hooked
from torch import nn

from eyas.engines.vllm.hooks import StreamHooks, stream_of
from eyas.engines.vllm.state_transfer import take_states
from eyas.errors import ContractError


class Shifting(Runner):
    """Gives the model positions that are ``by`` higher than those of the rows, as ``kinds`` rows of them."""

    by, kinds = 0, 0

    def __init__(self) -> None:
        super().__init__()
        decoder = self.model.model
        run = decoder.forward
        decoder.forward = lambda input_ids, positions: run(
            input_ids, positions[0] if positions.ndim == 2 else positions
        )

    def execute_model(self, scheduler_output: Any) -> str:
        decoder, real = self.model.model, self.model

        def give(input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            moved = positions + self.by
            return decoder(input_ids, moved.expand(self.kinds, -1) if self.kinds else moved)

        self.model = SimpleNamespace(model=give)
        try:
            return super().execute_model(scheduler_output)
        finally:
            self.model = real


def shifting(tmp_path: Path) -> Shifting:
    runner = Shifting()
    StreamHooks(runner, 0, NUM_LAYERS, range(NUM_LAYERS + 1), tmp_path)
    return runner


@pytest.mark.parametrize("by", [1, -1])
def test_rows_computed_at_other_positions_are_refused(tmp_path: Path, by: int) -> None:
    runner = shifting(tmp_path)
    runner.by = by
    runner.add("a", [1, 2, 3])
    runner.step({"a": (0, 3)})
    with pytest.raises(ContractError, match="rows 0 to 3 were computed at other positions"):
        take_states(tmp_path / "file-a", 1, threading.Event())


def test_positions_of_a_later_chunk_are_compared_with_its_own_rows(tmp_path: Path) -> None:
    runner = shifting(tmp_path)
    runner.add("a", [1, 2, 3, 4])
    runner.step({"a": (0, 2)})
    runner.by = 1
    runner.step({"a": (2, 2)})
    with pytest.raises(ContractError, match="rows 2 to 4 were computed at other positions"):
        take_states(tmp_path / "file-a", 1, threading.Event())


def test_positions_of_several_kinds_are_not_compared(tmp_path: Path) -> None:
    runner = shifting(tmp_path)
    runner.by, runner.kinds = 5, 3
    runner.add("a", [1, 2, 3])
    runner.step({"a": (0, 3)})
    found = take_states(tmp_path / "file-a", 1, threading.Event()).states
    torch.testing.assert_close(found, expected([1, 2, 3], True) + 5 * 1.5 ** torch.arange(4)[:, None])


def test_one_request_that_is_refused_leaves_the_others_of_its_batch(tmp_path: Path) -> None:
    runner = hooked(tmp_path)
    runner.add("a", [1, 2, 3])
    runner.add("b", [4, 5])
    runner.step({"a": (1, 2), "b": (0, 2)})  # the first row of a came from a cache
    with pytest.raises(ContractError, match="1 of 3 rows were never computed"):
        take_states(tmp_path / "file-a", 1, threading.Event())
    found = take_states(tmp_path / "file-b", 1, threading.Event())
    torch.testing.assert_close(found.states, expected([4, 5], True))


def test_a_request_that_was_refused_is_not_written_by_a_later_chunk(tmp_path: Path) -> None:
    runner = hooked(tmp_path)
    runner.add("a", [1, 2, 3, 4])
    runner.mix_up = True
    runner.step({"a": (0, 2)})
    runner.mix_up = False
    runner.step({"a": (0, 4)})
    with pytest.raises(ContractError, match="computed from other tokens"):
        take_states(tmp_path / "file-a", 1, threading.Event())
    assert list(tmp_path.iterdir()) == []


def test_only_the_first_rank_tells_why_a_request_was_refused(tmp_path: Path) -> None:
    runner = Runner()
    StreamHooks(runner, 1, NUM_LAYERS, range(NUM_LAYERS + 1), tmp_path)
    runner.add("a", [1, 2, 3])
    runner.mix_up = True
    runner.step({"a": (0, 3)})
    assert list(tmp_path.iterdir()) == []


class InPlaceLayer(nn.Module):
    """A layer that works in the memory of its input."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states.mul_(1.5)


@pytest.mark.parametrize("form", ["a tensor", "a tuple of one", "without a residual"])
def test_the_stream_of_a_layer_is_kept_when_the_next_layer_works_in_place(form: str) -> None:
    hidden = torch.ones(2, 3)
    output = {"a tensor": hidden, "a tuple of one": (hidden,), "without a residual": (hidden, None)}[form]
    stream = stream_of(output)
    InPlaceLayer()(hidden)
    assert torch.equal(stream, torch.ones(2, 3))


def test_layers_that_work_in_place_have_their_own_streams(tmp_path: Path) -> None:
    runner = Runner(residual=False)
    runner.model.model.layers = nn.ModuleList(InPlaceLayer() for _ in range(NUM_LAYERS))

    def contiguous(input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = (input_ids[:, None] * 1000.0 + positions[:, None]).repeat(1, 4)
        for layer in runner.model.model.layers:
            hidden = layer(hidden)
        return hidden

    runner.model.model.forward = contiguous
    StreamHooks(runner, 0, NUM_LAYERS, range(1, NUM_LAYERS + 1), tmp_path)
    runner.add("a", [1, 2, 3])
    runner.step({"a": (0, 3)})
    found = take_states(tmp_path / "file-a", 1, threading.Event()).states
    torch.testing.assert_close(found, expected([1, 2, 3], False)[:, 1:])
