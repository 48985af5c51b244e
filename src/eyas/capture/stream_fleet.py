"""Engines in actors of Ray that capture windows ahead of trainers, through the object store."""

import functools
import platform
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
import torch

from eyas.capture.capture_run import CaptureRun
from eyas.capture.fleet import common_facts
from eyas.capture.sample_checks import train_samples
from eyas.capture.stream_engine import StreamEngine
from eyas.capture.windows import Unit, Window
from eyas.errors import EyasError, UserError
from eyas.progress import say
from eyas.scale.cluster import ClusterAddress, check_room, cluster, joined
from eyas.train.launch import as_if_alone
from eyas.train.rank_errors import RankLeft
from eyas.train.ranks import Ranks
from eyas.types import HiddenStates, TargetSpec, TokenizedSample

if TYPE_CHECKING:
    from eyas.scale.fleet import Fleet


class Sent(NamedTuple):
    """A unit as it travels: the bytes of each sample's aux and last, as Ray hands them over uncopied."""

    parts: Sequence[tuple[np.ndarray, np.ndarray]]
    figures: Mapping[str, Any] | None
    seconds: float


class EngineFleet:
    """Captures units in order, at most ``room`` of them at a time with those that are trained on.

    The first rank drives the engines; every rank takes its own units as soon as they are there.
    """

    shares_device = False

    def __init__(self, run: CaptureRun, ranks: Ranks, room: int, on_gpu: bool) -> None:
        """``on_gpu`` says whether the trainers are on GPUs."""
        assert run.settings.fleet is not None
        assert run.actors is not None
        self.run, self.settings, self.actors = run, run.settings.fleet, run.actors
        self.ranks, self.room = ranks, room
        self.busy_s = 0.0
        self._fleet: Fleet | None = None
        self._driver: threading.Thread | None = None
        self._error: BaseException | None = None
        self._units: Sequence[Unit] = ()
        self._num_freed = self._num_left = 0
        self._arrived: queue.SimpleQueue[Sent | BaseException] = queue.SimpleQueue()
        self._stack = ExitStack()
        try:
            self._check_machines(on_gpu)
            place, name = ranks.on_first(self._open)
            if not ranks.is_first:
                self._stack.enter_context(joined(place))
                from eyas.scale.result_mailbox import ResultMailbox

                self._mailbox = ResultMailbox.find(name)
        except BaseException:
            self._stack.close()
            raise

    def begin(self, units: Sequence[Unit]) -> None:
        own = [unit.window for unit in units if unit.rank == self.ranks.rank]
        self._num_left = len(own)
        threading.Thread(target=self._take, args=(own,), daemon=True).start()
        if self.ranks.is_first:
            from eyas.scale.fleet import Fleet

            self._units = units
            say(f"train: {self.settings.replicas} engines capture {len(own)} windows; each is probed first")
            make = functools.partial(StreamWorker, self.actors.make_run)
            self._fleet = Fleet(units, make, self.settings, common_facts(self.run), self.room)
            self._driver = threading.Thread(target=self._drive, args=(self._fleet,), daemon=True)
            self._driver.start()

    def capture(self, unit: Unit, samples: Sequence[TokenizedSample]) -> Window:
        """Return a unit, and let the engines capture others in the place of the window before.

        Raises: the first error of an engine; EyasError when engines keep dying; RankLeft on a rank other than
        the first, which says why.
        """
        # The first rank has a part in every step, and has summed the last one up with all the others: they
        # have trained on the window before as well.
        while self._fleet and self._units[self._num_freed].window < unit.window:
            self._fleet.taken()
            self._num_freed += 1
        sent = self._arrived.get()
        if isinstance(sent, BaseException):
            self._say_why(unit, sent)
        self._num_left -= 1
        self.busy_s += sent.seconds
        if len(sent.parts) != len(samples):
            raise EyasError(f"{len(sent.parts)} samples came of {unit}, which has {len(samples)}")
        pairs = zip(samples, sent.parts, strict=True)
        return Window([_received(s, *part, self.run.spec) for s, part in pairs], sent.figures)

    def close(self) -> None:
        """Stop the engines: by themselves where all units have been taken, else at once."""
        if self._fleet and self._driver:
            if self._num_left:
                self._fleet.stop()
            self._driver.join()
        self._stack.close()
        if self._error and not self._num_left:
            raise self._error

    def _check_machines(self, on_gpu: bool) -> None:
        """Raises: UserError for a cluster that would take the trainers' GPUs, or not reach all of them."""
        here = self.actors.address is None
        if on_gpu and self.settings.gpus_per_replica and here:
            raise UserError(
                "Ray on this machine would give the trainer's GPU to an engine",
                hint="leave it out: CUDA_VISIBLE_DEVICES=1,2,3 ray start --head, then set ray.address=auto",
            )
        hosts = sorted(set(self.ranks.gather(platform.node())))
        if len(hosts) > 1 and here:
            raise UserError(
                f"the ranks are on {', '.join(hosts)}, and Ray would be started on one of them alone",
                hint="join them first (ray start --head; ray start --address HOST:6379), and set ray.address",
            )

    def _open(self) -> tuple[ClusterAddress, str]:
        """Start Ray or join it; return its address and the mailbox's name, for the other ranks."""
        with as_if_alone():
            place = self._stack.enter_context(cluster(self.actors.address, self.settings.replicas))
        check_room(self.settings)
        from eyas.scale.result_mailbox import ResultMailbox

        self._mailbox = ResultMailbox.open()
        return place, self._mailbox.name

    def _say_why(self, unit: Unit, found: BaseException) -> NoReturn:
        if self._error is not None:
            raise self._error
        from eyas.scale.result_mailbox import MailboxClosed

        if isinstance(found, MailboxClosed) and not self.ranks.is_first:
            raise RankLeft from found
        raise EyasError(
            f"{unit} did not arrive: {' '.join(str(found).split())[:300]}",
            hint="its machine may have gone; the last checkpoint is intact: run the same command again",
        ) from found

    def _drive(self, fleet: "Fleet") -> None:
        try:
            for unit, reference in fleet.results():
                self._mailbox.put((unit.window, unit.rank), reference)
                del reference
        except BaseException as error:
            self._error = error
            self._mailbox.close()

    def _take(self, windows: Sequence[int]) -> None:
        """Fetch this rank's units, in order, as soon as they are there."""
        try:
            for window in windows:
                self._arrived.put(self._mailbox.take((window, self.ranks.rank)))
        except BaseException as error:
            self._arrived.put(error)


class StreamWorker:
    """One engine of the fleet; it starts with the first window it is given, and is probed then."""

    def __init__(self, make_run: Callable[[], CaptureRun], name: str) -> None:
        self.run = make_run()
        self.engine: StreamEngine | None = None

    def facts(self) -> Mapping[str, str]:
        return common_facts(self.run)

    def do(self, units: Sequence[Unit]) -> Iterator[tuple[Unit, Sent]]:
        if self.engine is None:
            self.samples = train_samples(self.run)
            self.engine = StreamEngine(self.run, self.samples)
        for unit in units:
            started = time.monotonic()
            samples = [self.samples[i] for i in unit.samples]
            window = self.engine.capture(unit, samples)
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


def _received(sample: TokenizedSample, aux: np.ndarray, last: np.ndarray, spec: TargetSpec) -> HiddenStates:
    """Copy a sample out of the object store, so that its place there is free."""
    dtype = getattr(torch, spec.dtype)
    states = [torch.from_numpy(part.copy()).view(dtype) for part in (aux, last)]
    return HiddenStates(sample, states[0], states[1])
