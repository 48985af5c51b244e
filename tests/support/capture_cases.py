"""Runs of the fake engine for tests of capture, with prepared samples in a folder."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eyas.capture.capture_run import Actors, CaptureRun
from eyas.config.schema import ExtractSettings
from eyas.data.prepared import SPLITS, PreparedWriter, Split
from eyas.engines.base import Engine
from eyas.engines.fake.engine import FakeEngine
from eyas.store.storage import folder_of
from eyas.types import TargetSpec, TokenizedSample
from tiny import random_samples

LONGEST = 24


def write_samples(folder: Path, spec: TargetSpec, samples: dict[Split, list[TokenizedSample]]) -> Path:
    """Write a prepared folder."""
    folder.mkdir(parents=True)
    with PreparedWriter(folder, spec.vocab_size) as writer:
        for split, of_split in samples.items():
            for sample in of_split:
                writer.add_sample(split, sample)
    writer.finish(
        tokenizer_fingerprint=spec.tokenizer_fingerprint, template_fingerprint=spec.template_fingerprint
    )
    return folder


def samples_of(spec: TargetSpec, num_train: int = 6, num_held_out: int = 3) -> dict[Split, list[Any]]:
    every = random_samples(num_train + num_held_out, spec.vocab_size, longest=LONGEST)
    return {"train": every[:num_train], "held_out": every[num_train:]}


def make_capture_run(
    folder: Path,
    target: Path,
    spec: TargetSpec,
    engine: type[Any] | Callable[..., Engine] = FakeEngine,
    address: str | None = None,
    **settings: Any,
) -> CaptureRun:
    """Return a run of ``engine``; its samples lie in ``folder/prepared``, its states in ``folder/states``.

    Shards hold two samples or so.
    """
    samples = folder / "prepared"
    if not samples.exists():
        write_samples(samples, spec, samples_of(spec))
    run = functools.partial(make_capture_run, folder, target, spec, engine, address, **settings)
    found = ExtractSettings(**({"engine": "fake", "shard_bytes": 20_000} | settings))
    return CaptureRun(
        spec=spec,
        target_folder=target,
        samples_folder=samples,
        states_folder=folder_of(folder / "states"),
        splits=SPLITS,
        settings=found,
        max_length=LONGEST,
        make_engine=lambda: engine(target, spec),
        make_reference=lambda: None,
        actors=Actors(address, run) if found.fleet else None,
    )
