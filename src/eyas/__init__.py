"""Train draft models for a target LLM and prove that they work."""


def __getattr__(name: str) -> str:
    # Looked up when asked for: reading package metadata takes longer than the rest of a command's start.
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("eyas")
        except PackageNotFoundError:  # run from its source folder
            return "unknown"
    raise AttributeError(name)
