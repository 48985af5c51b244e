"""An engine that takes turns with a trainer: it is probed again before a window is learnt from."""

from pathlib import Path
from typing import Any

import pytest

from capture_cases import make_capture_run, samples_of
from eyas.capture.stream_engine import StreamEngine
from eyas.capture.windows import Unit
from eyas.engines.fake.engine import FakeEngine
from eyas.engines.probe import ProbeError
from eyas.errors import EyasError
from eyas.types import TargetSpec

UNIT = Unit(0, 0, (0, 1, 2))


class Shifting(FakeEngine):
    """Is off by one layer after its start."""

    def capture(self, samples: Any) -> Any:
        for item in super().capture(samples):
            if item.sample.sample_id == "sample-2":
                self.table = self.table.roll(1, 1)
            yield item


def test_a_window_holds_its_samples_states_and_their_statistics(
    tmp_path: Path, tiny_target: Path, tiny_spec: TargetSpec
) -> None:
    run = make_capture_run(tmp_path, tiny_target, tiny_spec)
    samples = samples_of(tiny_spec)["train"]
    engine = StreamEngine(run, samples)
    window = engine.capture(UNIT, samples[:3])
    engine.close()
    assert [s.sample.sample_id for s in window.states] == ["sample-0", "sample-1", "sample-2"]
    assert window.figures is not None
    assert window.figures["aux"]["count"] == sum(map(len, samples[:3])) * tiny_spec.hidden_size
    assert engine.busy_s > 0


def test_a_window_of_an_engine_that_drifted_meanwhile_is_not_handed_over(
    tmp_path: Path, tiny_target: Path, tiny_spec: TargetSpec
) -> None:
    samples = samples_of(tiny_spec)["train"]
    engine = StreamEngine(make_capture_run(tmp_path, tiny_target, tiny_spec, Shifting), samples)
    with pytest.raises(ProbeError, match="at the start and at the end"):
        engine.capture(UNIT, samples[:3])


def test_one_failed_sample_fails_the_window(tmp_path: Path, tiny_target: Path, tiny_spec: TargetSpec) -> None:
    samples = samples_of(tiny_spec)["train"]
    failing = frozenset({"sample-1"})
    run = make_capture_run(
        tmp_path, tiny_target, tiny_spec, lambda folder, spec: FakeEngine(folder, spec, fails=failing)
    )
    with pytest.raises(EyasError, match="1 samples failed"):
        StreamEngine(run, samples).capture(UNIT, samples[:3])


def test_an_engine_that_fails_the_probe_is_closed(
    tmp_path: Path, tiny_target: Path, tiny_spec: TargetSpec
) -> None:
    closed: list[bool] = []

    class Silent(FakeEngine):
        def probe_outputs(self, samples: Any) -> Any:
            return []

        def close(self) -> None:
            closed.append(True)

    with pytest.raises(ProbeError, match="samples went in, 0 came out"):
        StreamEngine(
            make_capture_run(tmp_path, tiny_target, tiny_spec, Silent), samples_of(tiny_spec)["train"]
        )
    assert closed == [True]
