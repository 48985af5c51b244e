"""Facts of transformers, which computes on this process's device and takes the memory that it needs."""

import importlib.metadata

from eyas.engines.info import EngineInfo, Installed


class TransformersInfo(EngineInfo):
    def installed(self) -> Installed:
        try:
            return Installed(importlib.metadata.version(self.name))
        except importlib.metadata.PackageNotFoundError:
            return Installed(None, "is not installed", "pip install eyas installs what it needs")


INFO = TransformersInfo(
    "transformers",
    "transformers",
    engine="eyas.engines.transformers.engine:TransformersEngine",
    captures=True,
    generates=True,
    opens_sessions=True,
)
