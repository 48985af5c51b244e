"""inspect draft: what a draft's folder holds, of any kind and format that eyas reads."""

from collections.abc import Iterator

from eyas.export.read import read_draft
from eyas.serving.fit import recorded_target
from eyas.stages.init_from import start_folder


def inspect_draft(name: str) -> Iterator[tuple[str, str]]:
    """Yield what is known of a folder, a hub id or a run's draft, as (name, value)."""
    folder = start_folder(name, "the draft")
    stored = read_draft(folder)
    shape, target = stored.shape, recorded_target(stored)
    yield "folder", str(folder)
    yield "kind", stored.architecture
    yield "format", "speculators" if "speculators_config" in stored.config else "native"
    yield "target", str(target.get("model", "not named: give --target"))
    yield "target's shape", f"{shape.target_vocab_size:,} ids, width {shape.target_hidden_size:,}"
    layers = stored.aux_layer_ids
    yield "aux layers", ", ".join(map(str, layers)) if layers else "not named: engines take their defaults"
    ids = len(stored.target_ids)
    yield "draft vocabulary", f"{ids:,} ids, {ids / shape.target_vocab_size:.1%} of the target's"
    yield "parameters", f"{sum(tensor.numel() for tensor in stored.tensors.values()):,}"
    yield "embedding", "in the folder" if stored.embedding is not None else "the target's"
    if shape.sliding_window is not None:
        yield "looks back", f"{shape.sliding_window:,} tokens"
