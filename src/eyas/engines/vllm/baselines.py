"""What drafts in vLLM without training: how vLLM is told, and whether it can here.

Each stands where the ``vllm.py`` of a kind of draft does, and has what the engine reads of that.
"""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from eyas.errors import UserError
from eyas.files import read_json
from eyas.types import TargetSpec

NAMES = ("ngram", "suffix", "mtp", "draft_model:FOLDER")
# What vLLM imports for a method, and the package that has it.
_NEEDS = {"ngram": ("numba", "numba"), "suffix": ("arctic_inference", "arctic-inference")}
# Where a target's config.json counts its own prediction layers.
_MTP_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_FURTHER: dict[str, dict[str, int]] = {
    # Tokens that an n-gram of the text so far must have in common with its end.
    "ngram": {"prompt_lookup_min": 2, "prompt_lookup_max": 5},
    # Prompts are served several times over: a cache of earlier answers would draft them from memory.
    "suffix": {"suffix_decoding_max_cached_requests": 0},
}


@dataclass(frozen=True)
class Baseline:
    """``folder`` is the other model of ``draft_model``."""

    method: str
    folder: Path | None = None

    OLDEST: ClassVar = (0, 22)
    ON_CPU: ClassVar = True
    TARGET_INTERFACE: ClassVar = None  # any target

    def speculative_config(self, draft: str | None, num_draft_tokens: int) -> dict[str, Any]:
        config: dict[str, Any] = {"method": self.method, "num_speculative_tokens": num_draft_tokens}
        config |= _FURTHER.get(self.method, {})
        if self.folder is not None:
            config["model"] = str(self.folder)
        return config

    def check(self, target: Path, spec: TargetSpec) -> None:
        """Raises: UserError for what cannot draft for this target here."""
        if self.method in _NEEDS and importlib.util.find_spec(_NEEDS[self.method][0]) is None:
            module, package = _NEEDS[self.method]
            raise UserError(
                f"evaluate.baselines: vLLM's {self.method} needs {module}, which is not installed",
                hint=f"pip install {package}, or leave {self.method} out",
            )
        if self.method == "mtp":
            _check_mtp(target)
        if self.folder is not None:
            _check_model(self.folder, spec)


def parse_baseline(name: str) -> Baseline:
    """Raises: UserError for a name that is none of ``NAMES``."""
    method, _, folder = name.partition(":")
    if (method == "draft_model") != bool(folder) or method not in [n.partition(":")[0] for n in NAMES]:
        raise UserError(
            f"evaluate.baselines: {name} is none of {', '.join(NAMES)}",
            hint="for example evaluate.baselines=[ngram,draft_model:/models/small]",
        )
    return Baseline(method, Path(folder) if folder else None)


def _check_mtp(target: Path) -> None:
    config = read_json(target / "config.json")
    parts = (config, config.get("text_config") or {})
    if not any(part.get(key) for part in parts for key in _MTP_KEYS):
        raise UserError(
            f"evaluate.baselines: the target in {target} has no MTP layers of its own",
            hint="leave mtp out",
        )


def _check_model(folder: Path, spec: TargetSpec) -> None:
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(
            f"evaluate.baselines: {folder} is no model folder",
            hint="draft_model: takes a local folder with config.json and weights",
        )
    size = read_json(path).get("vocab_size")
    if size != spec.vocab_size:
        raise UserError(
            f"evaluate.baselines: {folder} has {size} ids, the target {spec.vocab_size}",
            hint="name a model of the target's own family and tokenizer",
        )
