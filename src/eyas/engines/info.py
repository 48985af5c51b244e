"""What the rest of eyas may ask about an engine without starting it; each engine's folder answers.

``eyas.registry.ENGINES`` names the folder (or module); ``info.py`` in it holds ``INFO``. Nothing here imports
torch or the engine.
"""

from dataclasses import dataclass
from typing import Protocol

from eyas.config.schema import RunConfig


@dataclass(frozen=True)
class Installed:
    """The engine's package on this machine. ``version`` is None where it is not installed."""

    version: str | None
    trouble: str | None = None  # why this version cannot be used, in one sentence
    hint: str | None = None


class EngineInfo(Protocol):
    """Facts of one engine."""

    name: str
    captures: bool  # can compute hidden states
    captures_remotely: bool  # also from a server (extract.endpoint)
    generates: bool
    serves_drafts: bool  # decodes with an exported draft, and counts what is accepted

    def installed(self) -> Installed: ...
    def gpus(self, config: RunConfig) -> int:
        """Return the GPUs of one engine; 0 where it uses the device of this process."""

    def memory_share(self, config: RunConfig) -> float:
        """Return the share of a GPU's memory that it reserves; 0 where it takes what it needs."""
