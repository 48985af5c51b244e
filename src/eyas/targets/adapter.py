"""A folder that holds an adapter (LoRA) of a model is not a target: its base has other hidden states."""

import json
from pathlib import Path
from typing import Any

from eyas.errors import UserError

ADAPTER_CONFIG = "adapter_config.json"


def refuse_adapter(folder: Path, name: object) -> None:
    """Raise UserError when ``folder`` holds an adapter, whatever else it holds; ``name`` is the user's.

    transformers would put the adapter on its base, vLLM would leave it out.
    """
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        return
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8"))
        base = config.get("base_model_name_or_path") or config.get("model")  # peft; mlx
    except (ValueError, AttributeError, OSError):
        base = None
    raise UserError(
        f"{name} is an adapter of {base or 'another model'} ({ADAPTER_CONFIG}), not a whole model",
        hint="merge it first (peft: merge_and_unload, then save_pretrained), and name the merged folder; "
        f"if the weights are merged already, remove {ADAPTER_CONFIG}",
    )
