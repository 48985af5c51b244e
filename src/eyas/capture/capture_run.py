"""What capturing needs to know of a run: target, folders, settings, and how its engine is made."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from eyas.config.schema import ExtractSettings
from eyas.data.prepared import Split
from eyas.engines.base import Engine
from eyas.store.storage import Folder
from eyas.types import TargetSpec


@dataclass(frozen=True)
class Actors:
    """How engines of a fleet are made.

    ``address`` is the Ray cluster's (None: one is started on this machine); ``make_run`` is called in each
    actor, with the target as that actor's machine has it.
    """

    address: str | None
    make_run: Callable[[], "CaptureRun"]


@dataclass(frozen=True)
class CaptureRun:
    """One run, as far as hidden states are concerned.

    ``splits`` are those whose states are stored. ``make_reference`` makes a second engine that the first one
    must agree with, or returns None. ``actors`` is None where no fleet is asked for.
    """

    spec: TargetSpec
    target_folder: Path
    samples_folder: Path
    states_folder: Folder
    splits: tuple[Split, ...]
    settings: ExtractSettings
    max_length: int  # tokens of a sample
    make_engine: Callable[[], Engine]
    make_reference: Callable[[], Engine | None]
    actors: Actors | None = None
