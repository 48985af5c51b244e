"""What the files named after engines say about a kind of draft, for kinds with and without such a file."""

from collections.abc import Sequence
from typing import Any

from eyas import registry
from eyas.errors import UserError


def sglang_trouble(architecture: str, config: Any) -> str | None:
    """Say why SGLang would not serve a draft as it was trained, or None."""
    if not registry.has_drafter_file(architecture, "sglang"):
        return f"SGLang serves no drafts of kind {architecture}"
    trouble: str | None = registry.drafter_file(architecture, "sglang").trouble(config)
    return trouble


def check_layers(architecture: str, aux_layer_ids: Sequence[int]) -> None:
    """Raises: UserError for layers that some engine cannot capture: one folder serves all engines."""
    if registry.has_drafter_file(architecture, "sglang"):
        registry.drafter_file(architecture, "sglang").check_layers(aux_layer_ids)


def vllm_file(architecture: str) -> Any:
    """Return a kind's ``VllmFile``. Raises: UserError for a kind that vLLM does not serve."""
    if not registry.has_drafter_file(architecture, "vllm"):
        raise UserError(
            f"vLLM serves no drafts of kind {architecture}",
            hint="leave evaluate.engine out; eyas evaluate decodes in this process",
        )
    return registry.drafter_file(architecture, "vllm")
