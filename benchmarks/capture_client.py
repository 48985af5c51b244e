"""What a capture costs beside the engine: states that workers have staged are read, checked and written.

No engine runs and none needs to be installed, so this shows how many samples a second the client's side
takes, whatever the target. Prints one JSON object a prompt length, of the median run:

    python benchmarks/capture_client.py --lengths 64,224 --num-tokens 200000 --repeats 5 --output /dev/shm
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from capture import capture_to_disk, every_check, make_samples, parse, read_spec, write_config
from eyas.engines.vllm.engine import VllmEngine
from eyas.engines.vllm.engine_args import captured_layers
from eyas.engines.vllm.state_transfer import Finished, StagedStates, make_spare, write_states
from eyas.types import TargetSpec, TokenizedSample

_AT_ONCE = 64  # requests that end in one step of the engine


class StagedSession:
    """Stands where vLLM's session does: every request's states lie there already."""

    num_ranks = 1

    def __init__(self, folder: Path, spec: TargetSpec) -> None:
        self.staging, self.layer_ids = folder, captured_layers(spec)
        folder.mkdir()
        make_spare(folder)
        self._names: list[str] = []

    def stage(self, samples: Sequence[TokenizedSample], spec: TargetSpec) -> None:
        shape = len(samples[0]), len(self.layer_ids), spec.hidden_size
        states = torch.randn(shape).to(getattr(torch, spec.dtype))
        for number, sample in enumerate(samples, 1):
            token_ids = torch.from_numpy(sample.input_ids)
            write_states(
                self.staging / f"sample-{number:08d}", StagedStates.split(states, token_ids, self.layer_ids)
            )

    def submit(self, name: str, token_ids: Sequence[int], probe_output: bool) -> None:
        self._names.append(name)

    def has_output(self) -> bool:
        return bool(self._names)

    def finished(self) -> list[Finished]:
        ended, self._names = self._names[:_AT_ONCE], self._names[_AT_ONCE:]
        return [Finished(name, self.staging / name, "length", 1, None) for name in ended]

    def nudge(self) -> None:
        pass

    def abort(self, names: Sequence[str]) -> None:
        pass

    def close(self) -> None:
        pass


class StagedEngine(VllmEngine):
    def __init__(self, session: StagedSession, spec: TargetSpec, longest: int) -> None:
        super().__init__(session.staging, spec, max_length=longest, endpoint="http://nobody.is.asked")
        self._staged = session

    def _capturing(self) -> StagedSession:  # type: ignore[override]
        return self._staged


def measure(length: int, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    spec = read_spec(write_config(folder / "shape", options), options.dtype)
    samples = make_samples(length, options.num_tokens, spec)
    session = StagedSession(folder / "staging", spec)
    session.stage(samples, spec)
    engine, check = StagedEngine(session, spec, length), every_check(spec)
    started = time.process_time()
    run = capture_to_disk(engine, samples, check, folder / "store", options)
    cpu_s = time.process_time() - started
    return {
        "samples_per_s": len(samples) / run["seconds"],
        "cpu_ms_a_sample": cpu_s / len(samples) * 1e3,
        "mib_per_s": run["bytes"] / 2**20 / run["seconds"],
    }


def main() -> None:
    options = parse()
    torch.set_num_threads(1)  # for the main thread; others have one each
    for length in options.lengths:
        runs = []
        for _ in range(options.repeats + 1):  # the first warms up
            with tempfile.TemporaryDirectory(dir=options.output) as scratch:
                runs.append(measure(length, Path(scratch), options))
        median = {key: round(statistics.median(run[key] for run in runs[1:]), 2) for key in runs[0]}
        facts = {"prompt_tokens": length, "torch": torch.__version__, "processor": platform.machine()}
        print(json.dumps(facts | median | {"runs": options.repeats}), flush=True)


if __name__ == "__main__":
    main()
