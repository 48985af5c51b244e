"""Workers in Ray actors that share units of work; one that dies costs its unfinished units a retry."""

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Protocol

import ray
from ray.exceptions import RayActorError, RayTaskError

from eyas.config.schema import FleetSettings
from eyas.errors import ContractError, EyasError
from eyas.progress import say
from eyas.scale.work_queue import WorkQueue

# Deaths in a row of one replica that did no unit in between.
_MAX_DEATHS = 3
_POLL_S = 0.5
_SAY_AFTER_S = 60.0
_STOP = object()


class Worker(Protocol):
    """What an actor holds; made in the actor."""

    def facts(self) -> Mapping[str, str]:
        """Return what must be the same on every machine, by name."""
        ...

    def do(self, units: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
        """Yield (unit, result) as each is done for good, in any order."""
        ...

    def close(self) -> None:
        """Check for the last time, and stop. Raises: EyasError."""
        ...


class _Actor:
    """The worker's shell: it can be made without an error, so that an error is told apart from a death."""

    def start(self, make: Callable[[str], Worker], name: str) -> tuple[str, Mapping[str, str]]:
        self.worker = make(name)
        return ray.util.get_node_ip_address(), self.worker.facts()

    def do(self, units: Sequence[Any]) -> Iterator[Any]:
        """Yield each result, and apart from it whose it is: that can be known without fetching the result."""
        for unit, result in self.worker.do(units):
            yield result
            yield unit

    def close(self) -> None:
        self.worker.close()


class Fleet:
    """Runs ``units`` on ``settings.replicas`` workers; ``results`` yields (unit, result) as they come."""

    def __init__(
        self,
        units: Sequence[Any],
        make: Callable[[str], Worker],
        settings: FleetSettings,
        facts: Mapping[str, str],
        ahead: int | None = None,
    ) -> None:
        """With ``ahead``, units are done in order, at most so many beyond those that were ``taken``, and what
        comes are references to the results, which stay in the object store."""
        self.make, self.settings, self.facts = make, settings, facts
        self.num_deaths = 0
        self._keeps_references = ahead is not None
        self._units = WorkQueue(units, settings.replicas, ahead)
        self._found: queue.Queue[Any] = queue.Queue()
        self._actors: dict[int, Any] = {}

    def results(self) -> Generator[tuple[Any, Any], None, None]:
        """Raises: the first error of a worker; EyasError when workers keep dying."""
        threads = [
            threading.Thread(target=self._tend, args=(i,), daemon=True) for i in range(self.settings.replicas)
        ]
        for thread in threads:
            thread.start()
        try:
            running = len(threads)
            while running:
                found = self._found.get()
                if found is None:
                    running -= 1
                elif found is _STOP:
                    break
                elif isinstance(found, BaseException):
                    raise found
                else:
                    yield found
                    del found
        finally:
            self._units.stop()
            for actor in list(self._actors.values()):
                ray.kill(actor)
            for thread in threads:
                thread.join()

    def taken(self) -> None:
        """A result is done with: its memory may be another's."""
        self._units.make_room()

    def stop(self) -> None:
        """End ``results``, which another thread reads."""
        self._found.put(_STOP)

    def _tend(self, index: int) -> None:
        """Keep one replica alive until there is nothing left for it to do."""
        deaths = 0
        try:
            while not self._units.is_over:
                number = self._serve(index, deaths)
                if number is None:
                    break
                deaths = 1 if number else deaths + 1
                self.num_deaths += 1
                if deaths >= _MAX_DEATHS:
                    raise EyasError(
                        f"replica {index} died {deaths} times without finishing anything",
                        hint="look for memory that ran out; Ray's logs are under /tmp/ray on that machine",
                    )
        except RayTaskError as error:
            cause = error.cause
            self._found.put(cause if isinstance(cause, EyasError) else EyasError(f"replica {index}: {error}"))
        except BaseException as error:
            self._found.put(error)
        finally:
            self._found.put(None)

    def _serve(self, index: int, life: int) -> int | None:
        """Start a worker and feed it. Return None when all is done, or after how many units it died."""
        options = {"num_cpus": 1, "num_gpus": self.settings.gpus_per_replica, "max_restarts": 0}
        actor = self._actors[index] = ray.remote(_Actor).options(**options).remote()
        unfinished: list[Any] = []
        number = 0
        try:
            started = actor.start.remote(self.make, f"replica-{index}-{life}")
            # With a machine gone there may be no room; the others then do the rest.
            waiting_since: float | None = time.monotonic()
            while not ray.wait([started], timeout=_POLL_S)[0]:
                if self._units.is_over:
                    return None
                if waiting_since is not None and time.monotonic() - waiting_since > _SAY_AFTER_S:
                    say(f"replica {index} waits for a machine with room for it")
                    waiting_since = None
            self._check(*ray.get(started))
            while unfinished := self._units.take():
                for unit, result in _done(actor.do.options(num_returns="streaming").remote(unfinished)):
                    unfinished.remove(unit)
                    self._units.done(unit)
                    number += 1
                    self._found.put((unit, result if self._keeps_references else ray.get(result)))
                    del result  # a reference that is kept here keeps the result's memory
                if unfinished:
                    raise ContractError(f"replica {index} left out {unfinished[0]}")
            ray.get(actor.close.remote())
            return None
        except RayActorError as death:
            if self._units.is_over:
                return None
            reason = str(death).strip().splitlines()[0]
            say(f"replica {index} died, {len(unfinished)} unfinished parts go to others: {reason}")
            self._units.give_back(unfinished)
            return number
        finally:
            del self._actors[index]
            ray.kill(actor)

    def _check(self, host: str, found: Mapping[str, str]) -> None:
        for name, wanted in self.facts.items():
            if found.get(name) != wanted:
                raise ContractError(
                    f"{host}: {name} is {found.get(name)}, here {wanted}",
                    hint="every machine needs the same versions and target, and run_dir on a shared path",
                )


def _done(references: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield (unit, reference to its result) of what ``_Actor.do`` yields. Raises: what it raised."""
    for result in references:
        unit = next(references, None)
        yield ray.get(result if unit is None else unit), result  # an error is the last thing that comes
        del result
