"""Where training starts from: the target's own weights, or a draft that exists (draft.init_from)."""

import dataclasses
from pathlib import Path

import torch

from eyas.drafters.base import Draft, DraftConfig
from eyas.drafters.common.stored import StoredDraft
from eyas.drafters.layers_read import layers_read
from eyas.errors import UserError
from eyas.export.read import read_draft
from eyas.progress import say
from eyas.run_folder import draft_folder_of
from eyas.stages.run_context import RunContext
from eyas.targets.resolve_model import locate
from eyas.targets.teacher import TeacherHead
from eyas.types import TargetSpec, VocabMap


def read_start(context: RunContext) -> StoredDraft | None:
    """Read the draft that training is to go on from; None: the target's weights.

    Raises: UserError when it is for another kind of target or reads other aux layers.
    """
    name = context.config.draft.init_from
    if name is None:
        return None
    stored = read_draft(start_folder(name))
    spec, shape, drafter = context.draft_spec, stored.shape, context.drafter
    if stored.architecture != drafter.name:
        raise UserError(
            f"draft.init_from={name} is a draft of kind {stored.architecture}, this run trains "
            f"{drafter.name}",
            hint=f"set draft.architecture={stored.architecture}, or name another draft",
        )
    found = (shape.target_vocab_size, shape.target_hidden_size)
    if found != (spec.vocab_size, spec.hidden_size):
        raise UserError(
            f"draft.init_from={name} is for a target of {found[0]} ids and width {found[1]}; this one has "
            f"{spec.vocab_size} and {spec.hidden_size}",
            hint="name a draft of this target, or leave draft.init_from out",
        )
    ids = stored.aux_layer_ids or drafter.default_aux_layer_ids(spec.num_layers)
    if ids != spec.aux_layer_ids and set(ids) <= set(context.spec.aux_layer_ids):
        raise UserError(
            f"draft.init_from={name} reads aux layers {list(ids)}, this run's draft reads "
            f"{list(spec.aux_layer_ids)}",
            hint=f"set draft.aux_layer_ids={list(ids)}",
        )
    if ids != spec.aux_layer_ids:
        raise UserError(
            f"draft.init_from={name} reads aux layers {list(ids)}, this run captures "
            f"{list(context.spec.aux_layer_ids)}",
            hint=f"set target.aux_layer_ids={list(ids)}",
        )
    return stored


def start_folder(name: str, key: str = "draft.init_from") -> Path:
    """Return the draft's folder, of a run its draft; a hub id is downloaded. Raises: UserError."""
    try:
        return locate(str(draft_folder_of(Path(name))))
    except UserError as error:
        raise UserError(error.what, hint=f"{key} is a folder or a hub id owner/name") from None


def vocab_of(stored: StoredDraft) -> VocabMap:
    return VocabMap(stored.target_ids.numpy(), stored.shape.target_vocab_size)


def draft_from(stored: StoredDraft, context: RunContext, teacher: TeacherHead) -> Draft:
    """Build the stored draft, with the target's embedding where it is shared.

    Raises: UserError when it brings another embedding, which training would not see.
    """
    embedding = teacher.embedding
    own = stored.embedding
    if own is not None and not torch.allclose(own.float(), embedding.float(), rtol=1e-2, atol=1e-4):
        raise UserError(
            f"draft.init_from={context.config.draft.init_from} has an embedding that is not this target's",
            hint="is it a draft of this very target?",
        )
    draft: Draft = stored.build(embedding, teacher.head)
    say(f"train: going on from {context.config.draft.init_from}, in its shape and with its vocabulary")
    if stored.shape.sliding_window is not None:
        say(f"  it keeps its window of {stored.shape.sliding_window:,} tokens")
    return draft


def new_draft(context: RunContext, vocab: VocabMap, teacher: TeacherHead) -> Draft:
    """Build a draft of the configured shape that starts from the target's own weights."""
    drafter = context.drafter
    draft: Draft = drafter.build(draft_config(context, len(vocab)))
    seed = context.config.seed
    drafter.initialise(draft, context.target_folder, teacher, context.draft_spec, vocab, seed)
    return draft


def draft_config(context: RunContext, vocab_size: int, spec: TargetSpec | None = None) -> DraftConfig:
    """Return the configured shape of the draft; ``spec`` describes the target where a plan knows less of it.

    Raises: UserError when heads do not divide, or a layer that it reads is not captured.
    """
    settings = context.config.draft
    if spec is None:
        spec = context.draft_spec
    else:
        spec = dataclasses.replace(spec, aux_layer_ids=layers_read(context.drafter, settings, spec))
    config: DraftConfig = context.drafter.config_for(spec, settings, vocab_size)
    return config
