"""Capture with one engine of this process, a split after the other."""

import time
from collections.abc import Sequence

from eyas.capture.capture_run import CaptureRun
from eyas.capture.checked_writer import CheckedShardWriter, capture_into
from eyas.capture.probed_engine import ProbedEngine
from eyas.capture.split_work import SplitWork
from eyas.progress import Progress


def capture_in_process(run: CaptureRun, works: Sequence[SplitWork]) -> None:
    """Probe the engine, capture the missing shards of each split, probe again."""
    engine = ProbedEngine(run, [s for work in works for s in work.examples])
    try:
        num_failures = 0
        for work in works:
            num_failures += _capture_split(engine, work, run.settings.max_failures - num_failures)
        engine.probe_again()
    finally:
        engine.close()


def _capture_split(engine: ProbedEngine, work: SplitWork, max_failures: int) -> int:
    """Capture the missing shards of one split; return how many samples failed."""
    with (
        CheckedShardWriter(work.writer, engine.check, max_failures) as writer,
        Progress(f"extract {work.split}", work.missing_tokens, "tokens") as progress,
    ):
        started = time.monotonic()

        def note() -> str:
            rate = writer.written_bytes / 2**20 / max(time.monotonic() - started, 1e-9)
            return f"{rate:,.0f} MiB/s to disk, engine waited {writer.blocked_s:.1f} s for it"

        for item in capture_into(writer, engine.engine, work.shards()):
            progress.advance(len(getattr(item, "sample", ())), note())
        progress.advance(0, note())
        return len(writer.failures)
