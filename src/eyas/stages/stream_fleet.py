"""Engines in actors of Ray that capture windows ahead of a trainer, through the object store."""

import functools
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import torch

from eyas.config.load import LoadedConfig
from eyas.errors import EyasError, UserError
from eyas.progress import say
from eyas.scale.cluster import check_room, cluster
from eyas.scale.fleet import Fleet
from eyas.stages.context import RunContext
from eyas.stages.extract_fleet import check_fleet, common_facts, for_actors
from eyas.stages.stream import OneEngine, Window, train_samples
from eyas.types import HiddenStates, TokenizedSample


class Unit(NamedTuple):
    """A window that one engine captures: the samples, by index."""

    number: int
    samples: tuple[int, ...]

    def __str__(self) -> str:
        return f"window {self.number}"


class Sent(NamedTuple):
    """A window as it travels: the bytes of each sample's aux and last, as Ray hands them over uncopied."""

    parts: Sequence[tuple[np.ndarray, np.ndarray]]
    figures: Mapping[str, Any] | None
    seconds: float


class EngineFleet:
    """Captures the windows of a plan in order, at most ``ahead`` beyond the one that is trained on."""

    def __init__(self, context: RunContext, plan: Sequence[Sequence[int]], ahead: int) -> None:
        config = context.config
        fleet = config.extract.fleet
        assert fleet is not None
        check_fleet(config)
        if context.device == "cuda" and fleet.gpus_per_replica and config.ray.address is None:
            raise UserError(
                "Ray on this machine would give the trainer's GPU to an engine",
                hint="leave it out: CUDA_VISIBLE_DEVICES=1,2,3 ray start --head, then set ray.address=auto",
            )
        self.context, self.plan, self.ahead, self.settings = context, plan, ahead, fleet
        self.busy_s = 0.0
        self.fleet: Fleet | None = None
        self._results: Generator[tuple[Unit, Sent], None, None]
        self._last_taken = -1
        self._arrived: dict[int, Sent] = {}
        self._stack = ExitStack()
        self._stack.enter_context(cluster(config.ray.address, fleet.replicas))
        try:
            check_room(fleet)
        except BaseException:
            self._stack.close()
            raise

    def capture(self, samples: Sequence[TokenizedSample], number: int) -> Window:
        """Return a window, and let the engines capture another one in its place.

        Raises: the first error of an engine; EyasError when engines keep dying.
        """
        if self.fleet is None:
            self._start(number)
        else:
            self.fleet.taken()  # the window before
        while number not in self._arrived:
            unit, sent = next(self._results)
            self._arrived[unit.number] = sent
        sent = self._arrived.pop(number)
        self.busy_s += sent.seconds
        self._last_taken = number
        return Window([_received(*part, self.context) for part in _paired(samples, sent.parts)], sent.figures)

    def close(self) -> None:
        """Stop the engines: by themselves where all windows have been taken, else at once."""
        if self._last_taken == len(self.plan) - 1:
            next(self._results, None)
        elif self.fleet is not None:
            self._results.close()
        self._stack.close()

    def _start(self, first: int) -> None:
        units = [Unit(n, tuple(self.plan[n])) for n in range(first, len(self.plan))]
        say(f"train: {self.settings.replicas} engines capture {len(units)} windows; each is probed first")
        make = functools.partial(StreamWorker, for_actors(self.context.loaded))
        # The window that is trained on counts as one that is out.
        self.fleet = Fleet(units, make, self.settings, common_facts(self.context), self.ahead + 1)
        self._results = self.fleet.results()


class StreamWorker:
    """One engine of the fleet; it starts with the first window it is given, and is probed then."""

    def __init__(self, loaded: LoadedConfig, name: str) -> None:
        self.context = RunContext(loaded)
        self.engine: OneEngine | None = None

    def facts(self) -> Mapping[str, str]:
        return common_facts(self.context)

    def do(self, units: Sequence[Unit]) -> Iterator[tuple[Unit, Sent]]:
        if self.engine is None:
            self.samples = train_samples(self.context)
            self.engine = OneEngine(self.context, self.samples)
        for unit in units:
            started = time.monotonic()
            samples = [self.samples[i] for i in unit.samples]
            window = self.engine.capture(samples, unit.number)
            states = {s.sample.sample_id: s for s in window.states}
            ordered = [states[s.sample_id] for s in samples]
            parts = [(_bytes(s.aux), _bytes(s.last)) for s in ordered]
            yield unit, Sent(parts, window.figures, time.monotonic() - started)

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    out: np.ndarray = tensor.contiguous().view(torch.uint8).numpy()
    return out


def _paired(
    samples: Sequence[TokenizedSample], parts: Sequence[tuple[np.ndarray, np.ndarray]]
) -> Iterator[tuple[TokenizedSample, np.ndarray, np.ndarray]]:
    if len(samples) != len(parts):
        raise EyasError(f"{len(parts)} samples came of a window of {len(samples)}")
    for sample, (aux, last) in zip(samples, parts, strict=True):
        yield sample, aux, last


def _received(
    sample: TokenizedSample, aux: np.ndarray, last: np.ndarray, context: RunContext
) -> HiddenStates:
    """Copy a sample out of the object store, so that its place there is free."""
    dtype = getattr(torch, context.spec.dtype)
    return HiddenStates(sample, *(torch.from_numpy(x.copy()).view(dtype) for x in (aux, last)))
