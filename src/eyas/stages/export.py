"""export: the best checkpoint becomes the folder that inference engines load."""

from pathlib import Path
from typing import Any

import torch

from eyas import registry
from eyas.drafters.base import Draft, Drafter
from eyas.drafters.common.stored import share_target
from eyas.engines.info import draft_troubles
from eyas.errors import ContractError
from eyas.export.native import load_export
from eyas.export.read import kind_of
from eyas.files import atomic_folder, fingerprint, sha256_of_file
from eyas.progress import say
from eyas.report.stale import CARD
from eyas.stages.results import write_current_card
from eyas.stages.run_context import RunContext, begin, finish, next_command
from eyas.store.aux_subset import check_same_target, with_layers
from eyas.targets.teacher import TeacherHead, read_teacher
from eyas.train.checkpoint import best_checkpoint, load_weights, read_checkpoint

_VERIFIED_ROWS = 64


def export(context: RunContext) -> None:
    """Write the folder, reload it, and compare its logits with the trainer's on stored states."""
    trained = context.output_of("train")
    best = best_checkpoint(context.folder("train"))
    assert best is not None
    checkpoint = read_checkpoint(best)
    inputs = {
        "checkpoint": trained,
        "target": context.draft_spec.fingerprint,
        "export": context.config.export.model_dump(mode="json"),
    }
    check_same_target(checkpoint.spec, context.draft_spec_like(checkpoint.spec.weights_fingerprint))
    if not begin(context, "export", inputs, lambda: is_whole(context)):
        if not (context.folder("export") / CARD).is_file():  # a kill came between the record and the card
            write_current_card(context)
        return
    folder = context.folder("export")
    kind, spec = checkpoint.architecture, checkpoint.spec
    exporter = registry.resolve(registry.EXPORTERS, context.config.export.format, "export format")(kind)
    draft: Draft = registry.drafter(kind).build(checkpoint.draft_config)
    load_weights(checkpoint, draft)
    if not draft.config.has_own_embedding:
        teacher = read_teacher(context.target_folder, context.spec)
        ids = torch.from_numpy(checkpoint.vocab.target_ids)
        share_target(draft, teacher.embedding, teacher.head, ids)
    states = with_layers(context.store("held_out"), spec.aux_layer_ids).read(0)
    tokens = torch.from_numpy(states.sample.input_ids[1:]).long()[:_VERIFIED_ROWS]
    with atomic_folder(folder) as beside:
        (beside / "stage.json").write_bytes((folder / "stage.json").read_bytes())
        exporter.write(
            beside, draft, context.draft_spec, checkpoint.vocab, context.config.export.include_embedding
        )
        exporter.verify(beside, draft, checkpoint.vocab, states.aux[: len(tokens)], tokens)
    troubles = draft_troubles(kind, draft.config, spec.read_layers)
    finish(context, "export", _digests(folder), engine_troubles=troubles)
    write_current_card(context)
    for title, trouble in troubles.items():
        say(f"export: not for {title}: {trouble}")
    folder, k = context.folder("export"), context.config.evaluate.num_draft_tokens
    say(f"export: verified; serve it with: eyas serve {folder} -k {k}")
    next_command(context, "export")


def read_exported(context: RunContext, teacher: TeacherHead) -> tuple[Drafter, Any, torch.Tensor]:
    """Return the exported draft with its kind and its target ids, on the run's device.

    Raises: ContractError for a draft that was exported for another target.
    """
    draft, target_ids, config = load_export(context.folder("export"), teacher.embedding, teacher.head)
    spec = context.draft_spec_like(config["eyas"]["target"]["weights_fingerprint"])
    if config["eyas"]["target_fingerprint"] != spec.fingerprint:
        raise ContractError("the exported draft is for another target", hint="eyas export --fresh")
    drafter: Drafter = registry.drafter(kind_of(context.folder("export"), config))
    return drafter, draft.to(context.device), target_ids.to(context.device)


def is_whole(context: RunContext) -> bool:
    """Whether the exported files are, byte for byte, those that were verified."""
    folder = context.folder("export")
    try:
        return fingerprint(_digests(folder)) == context.output_of("export")
    except FileNotFoundError:
        return False


def _digests(folder: Path) -> list[str]:
    return [sha256_of_file(folder / name) for name in ("model.safetensors", "config.json")]
