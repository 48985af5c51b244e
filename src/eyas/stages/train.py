"""train: the draft, from stored states, on one device or several."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import eyas
from eyas.capture.stream import facts_of_stream
from eyas.config.load import flatten
from eyas.config.schema import MACHINE_SETTINGS
from eyas.data.prepared import read_samples
from eyas.data.vocab import always_kept, build_vocab_map, count_supervised, coverage
from eyas.files import fingerprint, sha256_of_file
from eyas.progress import mute, say
from eyas.stages.capture_run import open_stream
from eyas.stages.init_from import draft_from, new_draft, read_start, start_folder, vocab_of
from eyas.stages.run_context import RunContext, begin, finish, is_done_again, next_command
from eyas.store.aux_subset import check_states, with_layers
from eyas.store.manifest import StoreManifest
from eyas.targets.teacher import read_teacher
from eyas.trackers.base import Trackers
from eyas.train.checkpoint import best_checkpoint, read_checkpoint
from eyas.train.launch import launch_ranks
from eyas.train.loop import Trainer
from eyas.train.rank_errors import report_first_failure
from eyas.train.ranks import Ranks, check_gpus, check_shared, join_ranks, leave_ranks
from eyas.train.step_plan import check_ranks
from eyas.train.validation import check_held_out


def train(context: RunContext) -> None:
    """Build the draft vocabulary and the draft, train, keep the best checkpoint."""
    config = context.config
    settings = config.train
    inputs = {
        "states": context.output_of("extract"),
        "draft": context.loaded.recorded["draft"],
        "train": settings.model_dump(mode="json", exclude=MACHINE_SETTINGS | {"save_every"}),
        "seed": config.seed,
    }
    if config.draft.init_from is not None:
        files = sorted(start_folder(config.draft.init_from).glob("*.safetensors"))
        inputs["init_from"] = [sha256_of_file(path) for path in files]
    if settings.source == "stream":
        inputs["samples"] = context.output_of(context.samples_stage)
    for split in context.stored_splits:
        stored = StoreManifest.read(context.states_folder / split).spec
        check_states(stored, context.draft_spec_like(stored.weights_fingerprint))
    check_held_out(StoreManifest.read(context.states_folder / "held_out").shard_bounds[-1])
    if settings.num_gpus > 1 and not dist.is_torchelastic_launched():
        check_ranks(settings, settings.num_gpus)
        if context.train_device == "cuda":
            check_gpus(settings.num_gpus)
        fresh = ("--fresh",) if is_done_again(context, "train", inputs) else ()
        launch_ranks(settings.num_gpus, ("train", *fresh, *context.loaded.arguments))
        return
    ranks = join_ranks(context.train_device)
    if not ranks.is_first:
        mute()
    try:
        with report_first_failure(ranks):
            _train(context, ranks, inputs)
    finally:
        leave_ranks()


def _train(context: RunContext, ranks: Ranks, inputs: dict[str, Any]) -> None:
    config = context.config
    versions = f"eyas {eyas.__version__}, torch {torch.__version__}"
    ranks.check_same("versions", versions, hint="install the same versions on every machine")
    if not ranks.on_first(lambda: begin(context, "train", inputs, lambda: _is_whole(context))):
        return
    context.join("train")
    check_shared(ranks, context.folder("train"))
    counts = count_supervised(read_samples(context.samples_folder, "train"), context.spec.vocab_size)
    always = always_kept(counts, context.spec.eos_token_ids, context.tokenizer.added_tokens_decoder)
    start = read_start(context)
    vocab = vocab_of(start) if start else build_vocab_map(counts, config.draft.vocab_size, always)
    say(f"train: {len(vocab)} draft ids cover {coverage(counts, vocab):.2%} of the assistant's tokens")

    teacher = read_teacher(context.target_folder, context.spec).to("cpu", torch.float32)
    draft = draft_from(start, context, teacher) if start else new_draft(context, vocab, teacher)
    ids, captured = context.draft_spec.aux_layer_ids, context.spec.aux_layer_ids
    if ids != captured:
        say(f"train: the draft reads layers {list(ids)} of those that are captured, {list(captured)}")
    make = partial(
        Trainer,
        drafter=context.drafter,
        draft=draft,
        draft_settings=config.draft,
        teacher=teacher,
        vocab=vocab,
        held_out_states=with_layers(context.store("held_out"), ids),
        settings=config.train,
        seed=config.seed,
        root=context.folder("train"),
        device=torch.device(context.train_device),
        ranks=ranks,
    )
    facts: dict[str, Any] = {"coverage": coverage(counts, vocab)}
    if config.train.source == "stream":
        with open_stream(context, draft.config, ranks) as stream:
            trainer = make(train_states=with_layers(stream.states, ids), windows=stream.windows)
            _run(context, trainer)
            facts |= facts_of_stream(stream)
    else:
        trainer = make(train_states=with_layers(context.store("train"), ids))
        _run(context, trainer)
    if ranks.is_first:
        _finish(context, trainer, facts)


def _run(context: RunContext, trainer: Trainer) -> None:
    config, ranks = context.config, trainer.ranks
    ranks.check_same(
        "the draft to begin with",
        fingerprint([float(p.detach().sum(dtype=torch.float64)) for p in trainer.draft.trainable().values()]),
        hint="the target's folder must hold the same files on every machine",
    )
    names = config.train.trackers if ranks.is_first else ()
    with Trackers(names, config.run_dir, dict(flatten(config.model_dump(mode="json")))) as trackers:
        trainer.watch = trackers.log
        say(f"train: learning rate {trainer.settings.learning_rate}")
        trainer.run()


def _finish(context: RunContext, trainer: Trainer, facts: dict[str, Any]) -> None:
    best = best_checkpoint(context.folder("train"))
    assert best is not None
    checkpoint = read_checkpoint(best)
    finish(
        context,
        "train",
        sha256_of_file(best / "draft.safetensors"),
        best_step=checkpoint.step,
        num_steps=len(trainer.batches),
        acceptance_length=trainer.best,
        history=trainer.history,
        learning_rate=trainer.settings.learning_rate,
        **facts,
    )
    say(f"train: best validation acceptance length {trainer.best:.2f} at step {checkpoint.step}")
    next_command(context, "train")


def _is_whole(context: RunContext) -> bool:
    best = best_checkpoint(context.folder("train"))
    return best is not None and (best / "checkpoint.json").is_file()
