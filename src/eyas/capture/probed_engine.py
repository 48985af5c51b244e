"""An engine that has been started and has passed the probe, with the check of what it captures."""

import dataclasses
import functools
import time
from collections.abc import Sequence

import torch

from eyas.capture.capture_checks import check_states
from eyas.capture.capture_run import CaptureRun
from eyas.capture.checked_writer import Check
from eyas.capture.final_state_check import NUM_CALIBRATING, FinalStateCheck
from eyas.engines.base import Engine, ProbeOutput
from eyas.engines.probe import Probed, outside_envelope, probe, probe_again, probe_samples
from eyas.progress import say
from eyas.targets.teacher import TeacherHead, read_teacher
from eyas.types import TargetSpec, TokenizedSample


class ProbedEngine:
    """Starts the run's engine and probes it with samples made from ``examples``.

    ``check`` refuses states that the engine cannot have computed from their samples.
    Raises: ProbeError when the engine breaks its contract; it is closed then.
    """

    def __init__(self, run: CaptureRun, examples: Sequence[TokenizedSample]) -> None:
        self.spec = run.spec
        self.engine = run.make_engine()
        try:
            started = time.monotonic()
            self.engine.probe_outputs([])  # some engines start when they are first asked
            took = time.monotonic() - started
            say(f"extract: {run.settings.engine} started in {took:.0f} s; probing it")
            teacher = read_teacher(run.target_folder, run.spec)
            self.probed = _probed(run, self.engine, examples, teacher)
            self.check = _check_of(run.spec, self.engine, self.probed, examples, teacher)
        except BaseException:
            self.engine.close()
            raise

    def probe_again(self) -> None:
        """Raises: ProbeError unless the engine still gives the states that it gave at the start."""
        probe_again(self.engine, self.spec, self.probed)

    def close(self) -> None:
        self.engine.close()


def _probed(
    run: CaptureRun, engine: Engine, examples: Sequence[TokenizedSample], teacher: TeacherHead
) -> Probed:
    reference = run.make_reference()
    try:
        exact = teacher.to("cpu", torch.float32)
        logits = lambda last: exact.logits(last.float())  # noqa: E731
        probed = probe(engine, run.spec, probe_samples(examples), logits, reference)
    finally:
        if reference is not None:
            reference.close()
    say(
        f"extract: the engine passed the probe in {probed.seconds:.0f} s"
        + "".join(f"; {n}" for n in probed.notes)
    )
    return probed


def _check_of(
    spec: TargetSpec,
    engine: Engine,
    probed: Probed,
    examples: Sequence[TokenizedSample],
    teacher: TeacherHead,
) -> Check:
    """Return the check of each sample's states against what the probe saw and the sample's own tokens.

    How well states predict those is measured on a few ``examples``, each computed alone.
    """
    alone = [
        dataclasses.replace(s, sample_id=f"probe-own-{i}")
        for i, s in enumerate(examples[:: max(1, len(examples) // NUM_CALIBRATING)])
    ]
    known = [w.states for s in alone for w in engine.probe_outputs([s]) if isinstance(w, ProbeOutput)]
    last_check = FinalStateCheck.calibrated(spec, teacher, known)
    if last_check.usual_misses is None:
        say("  the target does not predict the data's answers well enough to tell states by their tokens")
    outside = functools.partial(outside_envelope, envelope=probed.envelope[:-1])
    return functools.partial(check_states, spec=spec, outside=outside, last_check=last_check)
