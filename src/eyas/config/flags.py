"""The flags of ``eyas extract`` that people know from elsewhere, and the settings they stand for."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Flag:
    """``key`` is the setting; None for flags that need the target to be understood."""

    name: str
    key: str | None
    kind: Any
    help: str
    serves: bool = False  # eyas serve-capture has it too

    @property
    def parameter(self) -> str:
        return self.name.strip("-").replace("-", "_")


EXTRACT_FLAGS = (
    Flag("--model-path", "target.model", str, "target folder or hub id", True),
    Flag("--prepared-data", "extract.prepared_data", str, "prepared folder, or JSONL of input_ids"),
    Flag("--output-dir", "run_dir", str, "folder of this run; the states go to its states/"),
    Flag("--engine", "extract.engine", str, "engine that computes the states"),
    Flag("--endpoint", "extract.endpoint", str, "vLLM server that captures (see eyas serve-capture)"),
    Flag("--batch-size", "extract.batch_size", int, "samples computed together", True),
    Flag("--max-seq-len", "data.max_length", int, "tokens of a sample at most", True),
    Flag("--tp-size", "vllm.tensor_parallel_size", int, "tensor-parallel GPUs of vLLM", True),
    Flag("--gpu-memory-utilization", "vllm.gpu_memory_utilization", float, "share of a GPU for vLLM", True),
    Flag("--layer-ids", None, str, "aux layers, as in 2 16 29 or 2,16,29", True),
    Flag("--layer-id-convention", None, str, "eyas: after L layers; output-of: of 0-based layer i", True),
)
