"""In place of torchvision, whose released wheels do not import next to a CPU build of torch.

Wrappers of several modalities import it for pictures. Their text models need none of it, so names exist and
compute nothing.
"""

from typing import Any

__version__ = "0.28.0"


class Nothing:
    """Whatever is imported; using it fails."""


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return Nothing
