"""Reads a model folder's config.json through transformers, for names that transformers lacks too."""

from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, AutoConfig

from eyas.errors import UserError
from eyas.files import read_json
from eyas.types import LATENT_KEYS

# Models that are another one under a name of their own; with this, no code from their folder is needed.
_SAME_AS = {"kimi_k2": "deepseek_v3"}


def read_config(folder: Path, trust_remote_code: bool = False) -> Any:
    """Return the transformers configuration of a model folder, with all its defaults.

    Raises: UserError when config.json cannot be read, names a model that transformers does not know, or
    transformers is one of those that old vLLMs ask for.
    """
    if int(transformers.__version__.partition(".")[0]) < 5:
        raise UserError(
            f"transformers {transformers.__version__} is too old, eyas needs 5.0",
            hint="pip install 'transformers>=5.0'; vLLM before 0.19 forbids that: install vllm>=0.31",
        )
    try:
        raw = read_json(folder / "config.json")
        if raw.get("model_type") in _SAME_AS:
            own = {key: value for key, value in raw.items() if key not in ("model_type", "auto_map")}
            return CONFIG_MAPPING[_SAME_AS[raw["model_type"]]].from_dict(own)
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:
        text = (str(error) or type(error).__name__).strip().splitlines()[0]
        if "trust_remote_code" in str(error):
            hint = "set target.trust_remote_code=true if you trust the code in the model folder"
        elif "does not recognize this architecture" in str(error):
            hint = "docs/reference/targets.md lists the architectures that are supported"
        else:
            hint = "the model folder is damaged; download or copy it again"
        raise UserError(f"cannot read {folder / 'config.json'}: {text}", hint=hint) from None


def latent_attention(text: Any) -> dict[str, int | None] | None:
    """Return the shape of a target's attention over latents, or None when it has another one."""
    if getattr(text, "kv_lora_rank", None) is None:
        return None
    return {key: getattr(text, key, None) for key in LATENT_KEYS}
