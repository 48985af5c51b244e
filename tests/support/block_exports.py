"""Block drafts written as the exporters write them."""

from pathlib import Path
from typing import Any, Literal

from block_training import Trained
from eyas import registry


def write_trained(folder: Path, trained: Trained, form: Literal["native", "speculators"] = "native") -> Path:
    """Write a folder, verified by reloading, and return it."""
    exporter: Any = registry.resolve(registry.EXPORTERS, form, "export format")(trained.name)
    folder.mkdir(parents=True)
    exporter.write(folder, trained.draft, trained.spec, trained.vocab)
    state = trained.answers[0]
    tokens = trained.batch(state).tokens[1:]
    exporter.verify(folder, trained.draft, trained.vocab, state.aux[: len(tokens)], tokens)
    return folder
