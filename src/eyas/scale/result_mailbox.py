"""Where a fleet's results wait for the processes that want them: references to them, not they themselves."""

import asyncio
import uuid
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

_NAMESPACE = "eyas"

Key = tuple[int, int]


class _Mailbox:
    """The mailbox itself: each result is taken once, and whoever comes first waits."""

    def __init__(self) -> None:
        self._waiting: dict[Key, asyncio.Future[list[Any]]] = {}

    async def put(self, key: Key, reference: list[Any]) -> None:
        self._of(key).set_result(reference)

    async def take(self, key: Key) -> list[Any]:
        reference = await self._of(key)
        del self._waiting[key]
        return reference

    def _of(self, key: Key) -> "asyncio.Future[list[Any]]":
        return self._waiting.setdefault(key, asyncio.get_running_loop().create_future())


class MailboxClosed(Exception):
    """Nothing will come any more; who closed it knows why."""


class ResultMailbox:
    """A mailbox as one process sees it.

    A reference travels in a list, so that Ray neither fetches it on the way nor loses count of who holds it:
    the result stays in the object store until the last one has let go, whatever became of its engine.
    """

    def __init__(self, actor: Any, name: str) -> None:
        self.name, self._actor = name, actor

    @classmethod
    def open(cls) -> "ResultMailbox":
        """Start a mailbox on this machine; it is there as long as what this returns."""
        name, here = f"mailbox-{uuid.uuid4().hex}", ray.get_runtime_context().get_node_id()
        strategy = NodeAffinitySchedulingStrategy(here, soft=False)
        options = {"num_cpus": 0, "name": name, "namespace": _NAMESPACE, "scheduling_strategy": strategy}
        return cls(ray.remote(_Mailbox).options(**options).remote(), name)

    @classmethod
    def find(cls, name: str) -> "ResultMailbox":
        """Return the mailbox of that name, which another process of the cluster has opened."""
        return cls(ray.get_actor(name, _NAMESPACE), name)

    def put(self, key: Key, reference: Any) -> None:
        ray.get(self._actor.put.remote(key, [reference]))

    def take(self, key: Key) -> Any:
        """Wait for a result and return it. Raises: MailboxClosed."""
        try:
            (reference,) = ray.get(self._actor.take.remote(key))
        except RayActorError:
            raise MailboxClosed from None
        return ray.get(reference)

    def close(self) -> None:
        """Wake up all who wait."""
        ray.kill(self._actor)
