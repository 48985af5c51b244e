"""Facts of the toy engine: a package that may be missing, one GPU of which it reserves half."""

import importlib.util

from eyas.config.schema import RunConfig
from eyas.engines.info import EngineInfo, Installed, TargetSize

PACKAGE = "transformers"  # stands for the engine's package


class ToyInfo(EngineInfo):
    def installed(self) -> Installed:
        if importlib.util.find_spec(PACKAGE) is None:
            return Installed(None, "the engine toy is not installed", "pip install toy")
        return Installed("1.0")

    def gpus(self, config: RunConfig) -> int:
        return 1

    def memory_share(self, config: RunConfig) -> float:
        return 0.5

    def memory(self, config: RunConfig, target: TargetSize) -> tuple[int, str]:
        return 3 * target.weight_bytes, "three copies of the weights"


INFO = ToyInfo("toy", "Toy", engine="toy_engine.engine:ToyEngine", captures=True)
