"""Train EAGLE-3 draft models for a target LLM and prove that they work."""

from importlib.metadata import version


def __getattr__(name: str) -> str:
    # Looked up when asked for: reading package metadata takes longer than the rest of a command's start.
    if name == "__version__":
        return version("eyas")
    raise AttributeError(name)
