"""States captured in turns with training: what is held, in which order, and that training is the same."""

import dataclasses
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.errors import ContractError
from eyas.row_stats import measure_rows
from eyas.store import window_store as streamed
from eyas.store.window_store import StreamedStates, owned, plan_windows
from eyas.train.loop import Trainer
from eyas.types import HiddenStates, TokenizedSample
from rank_cases import LENGTHS, spec_of, trainer_of, weights
from train_cases import Case, make_case

WINDOW_BYTES = 40_000  # about three batches of the case


class Capturing:
    """An engine over known states, which keeps account of the bytes alive of what it gave out."""

    def __init__(self, case: Case) -> None:
        self.spec = spec_of(case)
        self.states = {s.sample.sample_id: s for s in case.states}
        self.asked: list[list[str]] = []
        self.alive = self.peak = 0

    def __call__(self, samples: Sequence[TokenizedSample], number: int) -> list[HiddenStates]:
        self.asked.append([s.sample_id for s in samples])
        return [self._given(self.states[s.sample_id]) for s in samples]

    def _given(self, states: HiddenStates) -> HiddenStates:
        given = HiddenStates(states.sample, states.aux.clone(), states.last.clone())
        for tensor in (given.aux, given.last):
            self.alive += tensor.nbytes
            weakref.finalize(tensor, self._freed, tensor.nbytes)
        self.peak = max(self.peak, self.alive)
        return given

    def _freed(self, num_bytes: int) -> None:
        self.alive -= num_bytes


def streamed_trainer(root: Path, **settings: Any) -> tuple[Trainer, Capturing]:
    case = make_case(3, LENGTHS)
    capture = Capturing(case)
    states = StreamedStates(capture.spec, case.samples, capture, "streamed")
    trainer = trainer_of(case, root, case.states, num_epochs=2, **settings)
    states.plan([[step] for step in trainer.batches], WINDOW_BYTES)
    return dataclasses.replace(trainer, train_states=states, windows=states.windows), capture


def stored_trainer(root: Path) -> Trainer:
    case = make_case(3, LENGTHS)
    return trainer_of(case, root, case.states, num_epochs=2)


def same(one: Trainer, two: Trainer) -> bool:
    first, second = weights(one), weights(two)
    return all(torch.equal(first[name], second[name]) for name in first) and one.history == two.history


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True), max_size=30), st.integers(1, 3)
)
def test_windows_hold_every_step_in_order_no_sample_twice_and_no_share_above_its_bytes(
    samples: list[list[int]], num_ranks: int
) -> None:
    sizes = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    # A step's samples are dealt out, each as a batch of its own.
    steps = [[[[i] for i in step[rank::num_ranks]] for rank in range(num_ranks)] for step in samples]
    windows = plan_windows(steps, sizes, 12)
    assert [step for start, end in windows for step in steps[start:end]] == steps
    for start, end in windows:
        held = [[i for step in steps[start:end] for (i,) in step[rank]] for rank in range(num_ranks)]
        assert len({i for share in held for i in share}) == sum(map(len, held))
        assert end == start + 1 or all(sum(sizes[i] for i in share) <= 12 for share in held)


def test_training_from_a_stream_is_training_from_a_store_bit_for_bit(tmp_path: Path) -> None:
    stored = stored_trainer(tmp_path / "stored")
    stored.run()
    streamed, capture = streamed_trainer(tmp_path / "streamed")
    streamed.run()
    assert len(capture.asked) > 4
    assert same(stored, streamed)


def test_training_that_was_interrupted_within_a_window_replays_the_same_captures_and_ends_the_same(
    tmp_path: Path,
) -> None:
    whole, all_captures = streamed_trainer(tmp_path / "whole")
    whole.run()
    first, captures_before = streamed_trainer(tmp_path / "resumed")
    first.run(stop_after=6)
    resumed, captures_after = streamed_trainer(tmp_path / "resumed")
    resumed.run()
    assert same(whole, resumed)
    # The window in which training stopped is captured again as a whole.
    assert captures_before.asked[-1] == captures_after.asked[0]
    assert captures_before.asked + captures_after.asked[1:] == all_captures.asked


def test_a_slow_consumer_never_has_more_states_alive_than_the_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, capture = streamed_trainer(tmp_path)
    states = trainer.train_states
    assert isinstance(states, StreamedStates)
    now_s, step, take = 0.0, trainer._step, states._capture

    def slow_step(*arguments: Any) -> None:
        nonlocal now_s
        step(*arguments)
        now_s += 3

    def slow_capture(*arguments: Any) -> Any:
        nonlocal now_s
        now_s += 0.5
        return take(*arguments)

    monkeypatch.setattr(trainer, "_step", slow_step)
    monkeypatch.setattr(states, "_capture", slow_capture)
    monkeypatch.setattr(streamed, "time", SimpleNamespace(monotonic=lambda: now_s))
    trainer.run()
    assert WINDOW_BYTES / 2 < capture.peak <= WINDOW_BYTES
    assert states.turns.peak_bytes == capture.peak
    assert capture.alive == 0, "nothing is kept when training ends"
    assert states.turns.trainer_s == 3 * trainer.history[-1]["step"]
    assert states.turns.waited_s == 0.5 * states.turns.num_windows


def test_a_sample_outside_the_window_is_not_given() -> None:
    case = make_case(3, LENGTHS)
    states = StreamedStates(spec_of(case), case.samples, Capturing(case), "")
    states.plan([[[[0, 1]]], [[[0, 2]]]], WINDOW_BYTES)
    (run,) = states.windows([[[0, 1]], [[0, 2]]], 0, 1)
    assert run == [[0, 1]]
    with pytest.raises(ContractError, match="outside its window"):
        states.read(0)


def test_owned_states_keep_nothing_else_alive_and_have_the_targets_type() -> None:
    case = make_case(3, LENGTHS)
    spec = spec_of(case)
    views = case.states[0]  # views of the streams of all samples
    assert views.aux.untyped_storage().nbytes() > views.aux.nbytes
    own = owned(views, spec)
    assert own.aux.untyped_storage().nbytes() == own.aux.nbytes
    assert torch.equal(own.aux, views.aux)
    assert owned(views, dataclasses.replace(spec, dtype="bfloat16")).last.dtype == torch.bfloat16


def test_owned_states_keep_figures_that_are_still_theirs() -> None:
    case = make_case(3, LENGTHS)
    spec, states = spec_of(case), case.states[0]
    figures = measure_rows(states.aux), measure_rows(states.last[:, None])[:, 0]
    kept = owned(dataclasses.replace(states, figures=figures), spec).figures
    assert kept is not None
    assert all(torch.equal(one, other) for one, other in zip(kept, figures, strict=True))
    rounded = dataclasses.replace(spec, dtype="bfloat16")
    assert owned(dataclasses.replace(states, figures=figures), rounded).figures is None
