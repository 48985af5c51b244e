from typing import Any

from torchvision import Nothing
from torchvision.transforms import InterpolationMode as InterpolationMode


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return Nothing
