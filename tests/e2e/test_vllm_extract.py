"""eyas extract --engine vllm from the command line: killed twice, resumed, and every row right."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from vllm_cases import (
    VOCAB_SIZE,
    make_model,
    reference_states,
    sample_of,
    spec_of_model,
    worst_difference,
    write_tokenizer,
)

pytest.importorskip("vllm", reason="vllm is not installed")

import torch

from eyas.engines.vllm.session import make_staging
from eyas.store.journal import read_journal
from eyas.store.shards import ShardStore

pytestmark = pytest.mark.filterwarnings("ignore")

NUM_SAMPLES = 400
AUX = (2, 3)  # of 4 layers; asked for in the other convention, with the last layer named too


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_model(tmp_path_factory.mktemp("models") / "llama")
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("data") / "samples.jsonl"
    with path.open("w") as f:
        for i in range(NUM_SAMPLES):
            length = int(rng.integers(2, 250))
            row = {"id": f"row-{i}", "input_ids": rng.integers(3, VOCAB_SIZE, length).tolist()}
            if i % 2:
                row["loss_mask"] = [0] * (length // 2) + [1] * (length - length // 2)
            f.write(json.dumps(row) + "\n")
    return path


class Run:
    """The command in a process group of its own, as a terminal would start it."""

    def __init__(self, target: Path, data: Path, out: Path) -> None:
        self.states = out / "states"
        arguments = (
            f"extract --model-path {target} --prepared-data {data} --output-dir {out} --engine vllm "
            "--batch-size 8 --max-seq-len 256 --tp-size 1 --layer-ids 1 2 3 --layer-id-convention output-of "
            "extract.batch_tokens=64 extract.shard_bytes=1000000"
        )
        self.log = (out.parent / f"log-{time.monotonic_ns()}").open("w")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "eyas", *arguments.split()],
            stderr=self.log,
            stdout=self.log,
            start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def wait_for_shards(self, num: int) -> None:
        deadline = time.monotonic() + 300
        while len(read_journal(self.states / "train")) < num:
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.02)

    def engine_processes(self, name: str = "VLLM") -> list[int]:
        """Return the ids of this run's other processes called so, vLLM's once they are up."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != self.process.pid:
                try:
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                    called = (entry / "comm").read_text()
                except OSError:
                    continue
                if int(fields[2]) == self.process.pid and name in called:
                    found.append(int(entry.name))
        return found

    def text(self) -> str:
        return Path(self.log.name).read_text()

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.log.close()


def test_killing_the_engine_or_the_writer_loses_nothing_and_the_same_command_resumes(
    target: Path, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    first = Run(target, data, out)
    try:
        first.wait_for_shards(2)
        engines = first.engine_processes()
        assert engines, first.text()
        os.kill(engines[0], signal.SIGKILL)
        assert first.process.wait(300) == 1, first.text()
    finally:
        first.end()
    assert "error: vLLM stopped:" in first.text()
    assert "run the same command again" in first.text()
    kept = read_journal(out / "states" / "train")
    assert len(kept) >= 2

    second = Run(target, data, out)
    try:
        second.wait_for_shards(len(kept) + 2)
        second.process.kill()
    finally:
        second.end()

    third = Run(target, data, out)
    try:
        assert third.process.wait(400) == 0, third.text()
    finally:
        third.end()
    log = third.text()
    assert "the engine passed the probe" in log
    assert "layer 4 is the last: it is always stored" in log
    assert {n: r.checksum for n, r in read_journal(out / "states" / "train").items() if n in kept} == {
        n: r.checksum for n, r in kept.items()
    }
    _check_store(out / "states", target, num_samples=NUM_SAMPLES)


def test_a_signal_while_the_engine_starts_ends_the_command(target: Path, data: Path, tmp_path: Path) -> None:
    """vLLM takes a KeyboardInterrupt of that time for nothing, and waits on for minutes."""
    run = Run(target, data, tmp_path / "run")
    try:
        deadline = time.monotonic() + 300
        while len(run.engine_processes("")) < 2:  # Python's own resource tracker, and the engine
            assert run.process.poll() is None, run.text()
            assert time.monotonic() < deadline, run.text()
            time.sleep(0.1)
        run.process.terminate()
        assert run.process.wait(120) == 130, run.text()
        assert "interrupted; the same command goes on from here" in run.text()
        assert not run.engine_processes()
    finally:
        run.end()


def _check_store(states: Path, target: Path, num_samples: int) -> None:
    spec = spec_of_model(target, AUX)
    found, samples = {}, []
    for split in ("train", "held_out"):
        store = ShardStore(states / split)
        assert store.spec.aux_layer_ids == AUX
        for index in range(len(store.lengths)):
            item = store.read(index)
            samples.append(item.sample)
            found[item.sample.sample_id] = item
    assert len(found) == len(samples) == num_samples
    some = samples[:: len(samples) // 60]
    known = reference_states(target, spec, [sample_of(s.sample_id, s.input_ids) for s in some])
    for sample in some:
        item, full = found[sample.sample_id], known[sample.sample_id]
        last = full[torch.from_numpy(sample.supervised), -1:]
        assert worst_difference({"aux": item.aux}, {"aux": full[:, :-1]}) < 1e-5
        assert worst_difference({"last": item.last[:, None]}, {"last": last}) < 1e-5


def test_what_a_killed_run_staged_is_removed_by_the_next(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    old = tmp_path / f"eyas-staging-{ended.pid}-abc"
    own = tmp_path / f"eyas-staging-{os.getpid()}-abc"
    old.mkdir()
    own.mkdir()
    torch.save({}, old / "left-over")
    made = make_staging(tmp_path, 1 << 20)
    assert not old.exists()
    assert own.exists()
    assert made.parent == tmp_path
