"""The engine that stages of one command share: started once, kept between the stages, ended by its owner."""

from collections.abc import Callable
from typing import Any

from eyas.progress import say


class EngineOwner:
    """Keeps one engine while ``keeps``; a stage that closes what it was lent only hands it back."""

    def __init__(self) -> None:
        self.keeps = False
        self._engine: Any = None

    def lend(self, start: Callable[[], Any]) -> Any:
        """Return the engine as an ``engines.base.Engine``; ``start`` makes it for the first who asks."""
        assert self.keeps
        if self._engine is None:
            self._engine = start()
        else:
            say("  the engine that is running serves this stage too")
        return _Lent(self._engine)

    def keep(self, keeps: bool) -> None:
        """Keep the engine for the next stage, or end it; then each stage has its own."""
        self.keeps = keeps
        if not keeps:
            engine, self._engine = self._engine, None
            if engine is not None:
                engine.close()

    def close(self) -> None:
        self.keep(False)


class _Lent:
    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def close(self) -> None:
        """Leave it to the owner."""
