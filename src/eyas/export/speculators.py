"""The speculators format: the same tensors under a config.json that names target and method.

vLLM starts it by ``vllm serve FOLDER`` alone, for the folder says what the target is.
"""

from pathlib import Path
from typing import Any

from eyas.export.native import NativeExporter
from eyas.files import write_json
from eyas.types import TargetSpec, VocabMap


class SpeculatorsExporter(NativeExporter):
    """Writes and verifies as the native exporter does, but for config.json."""

    def write_config(self, folder: Path, draft: Any, spec: TargetSpec, vocab: VocabMap) -> None:
        self.kind.check_speculators(draft.config)
        native = self.described(folder, draft, spec, vocab)
        write_json(folder / "config.json", self.kind.speculators_config(native))
