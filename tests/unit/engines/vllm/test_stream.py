"""What is captured is handed on when it is there, whatever the engine does meanwhile."""

import threading
import time
from pathlib import Path

import pytest
import torch

from eyas.engines.vllm.engine import VllmEngine
from eyas.engines.vllm.session import shut_down
from eyas.engines.vllm.state_transfer import Finished, StagedStates, write_states
from eyas.types import HiddenStates
from vllm_cases import make_model, mixed_samples, spec_of_model


class SlowSession:
    """Its second sample takes until the first one has been handed on."""

    num_ranks = 1
    layer_ids = (1, 2, 4)

    def __init__(self, folder: Path, width: int) -> None:
        self.folder, self.width = folder, width
        self.names: list[str] = []
        self.first_is_out = threading.Event()

    def submit(self, name: str, token_ids: list[int], probe_output: bool) -> None:
        states = torch.randn(len(token_ids), 3, self.width)
        staged = StagedStates.split(states, torch.tensor(token_ids), self.layer_ids)
        # A file comes a little after the engine's word of it.
        threading.Timer(0.3, write_states, (self.folder / name, staged)).start()
        self.names.append(name)

    def has_output(self) -> bool:
        return self.first_is_out.is_set()

    def finished(self) -> list[Finished]:
        if len(self.names) < 2:
            assert self.first_is_out.wait(20), "the first sample's states were kept waiting"
        name = self.names.pop(0)
        return [Finished(name, self.folder / name, "length", 5, None)]

    def nudge(self) -> None:
        pass

    def abort(self, names: list[str]) -> None:
        pass


def test_states_are_not_kept_waiting_for_the_engines_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(tmp_path / "model")
    spec = spec_of_model(model, (1, 2))
    session = SlowSession(tmp_path, spec.hidden_size)
    engine = VllmEngine(model, spec, endpoint="http://nowhere/v1")
    monkeypatch.setattr(engine, "_capturing", lambda: session)
    found = engine.capture(mixed_samples([4, 9]))
    first = next(found)
    session.first_is_out.set()
    second = next(found)
    for item, length in ((first, 4), (second, 9)):
        assert isinstance(item, HiddenStates)
        assert len(item.sample) == length


def test_a_vllm_that_is_cleaning_up_already_is_waited_for() -> None:
    """It notes a dead engine in a thread of its own; a call that finds it begun returns at once."""
    released, cleaned = threading.Event(), threading.Event()

    def clean_up() -> None:
        released.wait(10)
        time.sleep(0.1)
        cleaned.set()

    class Core:
        def shutdown(self) -> None:
            released.set()
            raise RuntimeError("the engine is dead")

    thread = threading.Thread(target=clean_up, name="MPClientEngineMonitor", daemon=True)
    thread.start()
    shut_down(Core())
    assert cleaned.is_set()
    assert not thread.is_alive()
