"""A window source with one engine of this process, which takes turns with the trainer."""

import functools
import time
from collections.abc import Sequence

from eyas.capture.capture_run import CaptureRun
from eyas.capture.checked_writer import CheckedShardWriter, capture_into
from eyas.capture.probed_engine import ProbedEngine
from eyas.capture.sample_checks import examples_of
from eyas.capture.windows import Unit, Window
from eyas.engines.probe import compare_states
from eyas.store.window_store import owned
from eyas.train.launch import as_if_alone
from eyas.train.ranks import Ranks
from eyas.types import TokenizedSample


class StreamEngine:
    """An engine of this process, started and probed, and probed again after each window."""

    shares_device = True

    def __init__(self, run: CaptureRun, samples: Sequence[TokenizedSample]) -> None:
        self.spec, self.busy_s = run.spec, 0.0
        with as_if_alone():
            self.engine = ProbedEngine(run, examples_of(samples))

    def compare(self, ranks: Ranks) -> None:
        """Raises: ProbeError where this rank's engine gives other states than the first one's."""
        states = self.engine.probed.states
        known = ranks.on_first(lambda: states)
        compare_states(states, known, self.spec, f"on rank {ranks.rank} and on rank 0")

    def begin(self, units: Sequence[Unit]) -> None:
        pass

    def capture(self, unit: Unit, samples: Sequence[TokenizedSample]) -> Window:
        """Return the states of ``samples``, checked as extract does.

        Raises: ContractError for wrong states or an engine that has drifted; EyasError for a failed sample.
        """
        started, window = time.monotonic(), Window()
        own = functools.partial(owned, spec=self.spec)
        with CheckedShardWriter(window, self.engine.check, max_failures=0) as writer:
            for _ in capture_into(writer, self.engine.engine, [(0, samples)], own):
                pass
        # Before anything is learnt from them: a checkpoint could not be told from a good one afterwards.
        self.engine.probe_again()
        self.busy_s += time.monotonic() - started
        return window

    def close(self) -> None:
        self.engine.close()
