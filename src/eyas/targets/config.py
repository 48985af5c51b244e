"""Reads a model folder's config.json through transformers, for names that transformers lacks too."""

from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from eyas.errors import UserError
from eyas.files import read_json
from eyas.targets.adapter import refuse_adapter
from eyas.types import LATENT_KEYS

# Models that are another one under a name of their own; with this, no code from their folder is needed.
_SAME_AS = {"kimi_k2": "deepseek_v3"}
# What decoders mostly mean where config.json is silent and no class knows better.
_DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 0,
    "rope_parameters": None,
    "tie_word_embeddings": False,
}


def read_config(folder: Path, trust_remote_code: bool = False) -> Any:
    """Return the transformers configuration of a model folder, with all its defaults.

    Raises: UserError when config.json cannot be read, names a model that transformers does not know,
    transformers is one of those that old vLLMs ask for, or the folder holds an adapter.
    """
    if int(transformers.__version__.partition(".")[0]) < 5:
        raise UserError(
            f"transformers {transformers.__version__} is too old, eyas needs 5.0",
            hint="pip install 'transformers>=5.0'; vLLM before 0.19 forbids that: install vllm>=0.31",
        )
    refuse_adapter(folder, folder)
    try:
        raw = read_json(folder / "config.json")
        if raw.get("model_type") in _SAME_AS:
            own = {key: value for key, value in raw.items() if key not in ("model_type", "auto_map")}
            config = CONFIG_MAPPING[_SAME_AS[raw["model_type"]]].from_dict(own)
        else:
            # A folder's own code was written for the transformers of its day, and for other ways in.
            trust = trust_remote_code and not _has_own_class(raw)
            config = AutoConfig.from_pretrained(folder, trust_remote_code=trust)
    except Exception as error:
        text = (str(error) or type(error).__name__).strip().splitlines()[0]
        if "trust_remote_code" in str(error):
            hint = "set target.trust_remote_code=true if you trust the code in the model folder"
        elif "does not recognize this architecture" in str(error):
            hint = "docs/reference/targets.md lists the architectures that are supported"
        else:
            hint = "the model folder is damaged; download or copy it again"
        raise UserError(f"cannot read {folder / 'config.json'}: {text}", hint=hint) from None
    if getattr(config.get_text_config(), "tie_word_embeddings", False):
        # A wrapper that says so in its text_config only; vLLM ties it, transformers asks the wrapper.
        config.tie_word_embeddings = True
    return config


def is_of_folder(config: Any) -> bool:
    """Whether a configuration's class is code of the model folder, not transformers' own."""
    return type(config).__module__.startswith("transformers_modules.")


def _has_own_class(raw: dict[str, Any]) -> bool:
    """Whether transformers has the model that config.json names, so that no code of its folder is needed.

    It spells some names in its own way: Kimi_K25ForConditionalGeneration.
    """
    from transformers.models.auto import modeling_auto

    name, architectures = raw.get("model_type"), raw.get("architectures") or []
    tables = (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )
    known = {str(table.get(name)).replace("_", "") for table in tables}
    return name in CONFIG_MAPPING and bool(known & set(architectures[:1]))


def plain_config(folder: Path) -> Any:
    """Return what config.json says and no more, for a model that transformers does not know.

    Raises: UserError when it is damaged.
    """
    path = folder / "config.json"
    try:
        raw = read_json(path)
        config = PretrainedConfig.from_dict(_DEFAULTS | {k: v for k, v in raw.items() if k != "text_config"})
        if isinstance(raw.get("text_config"), dict):
            config.text_config = PretrainedConfig.from_dict(_DEFAULTS | raw["text_config"])
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise UserError(f"cannot read {path}: {error}", hint="copy it again") from None
    return config


def quantization(folder: Path) -> dict[str, Any]:
    """Return how config.json says that the text model is quantised; empty for plain weights."""
    raw = read_json(folder / "config.json")
    inner = raw.get("text_config") or {}
    return inner.get("quantization_config") or raw.get("quantization_config") or {}


def latent_attention(text: Any) -> dict[str, int | None] | None:
    """Return the shape of a target's attention over latents, or None when it has another one."""
    if getattr(text, "kv_lora_rank", None) is None:
        return None
    return {key: getattr(text, key, None) for key in LATENT_KEYS}
