"""train: the draft, from stored states."""

import torch

from eyas.config.load import flatten
from eyas.data.prepared import read_samples
from eyas.data.vocab import always_kept, build_vocab_map, count_supervised, coverage
from eyas.draft.base import DraftConfig, draft_config_for
from eyas.draft.eagle3 import Eagle3Draft
from eyas.errors import UserError
from eyas.progress import say
from eyas.stages.context import RunContext, begin, finish, next_command
from eyas.store.manifest import StoreManifest
from eyas.store.shards import ShardStore
from eyas.targets.families import family_of
from eyas.targets.teacher import TeacherHead, read_teacher
from eyas.targets.weights import read_layer
from eyas.trackers.base import Trackers
from eyas.train.checkpoint import best_checkpoint, read_checkpoint
from eyas.train.loop import Trainer
from eyas.types import TargetSpec, VocabMap


def train(context: RunContext) -> None:
    """Build the draft vocabulary and the draft, train, keep the best checkpoint."""
    config = context.config
    inputs = {
        "states": context.output_of("extract"),
        "draft": config.draft.model_dump(mode="json"),
        "train": config.train.model_dump(mode="json", exclude={"save_every", "device", "trackers"}),
        "num_draft_tokens": config.evaluate.num_draft_tokens,
        "seed": config.seed,
    }
    check_same_target(StoreManifest.read(context.folder("extract") / "train").spec, context.spec)
    if not begin(context, "train", inputs):
        return
    stores = {split: ShardStore(context.folder("extract") / split) for split in ("train", "held_out")}
    counts = count_supervised(read_samples(context.samples_folder, "train"), context.spec.vocab_size)
    always = always_kept(counts, context.spec.eos_token_ids, context.tokenizer.added_tokens_decoder)
    vocab = build_vocab_map(counts, config.draft.vocab_size, always)
    say(f"train: {len(vocab)} draft ids cover {coverage(counts, vocab):.2%} of the assistant's tokens")

    teacher = read_teacher(context.target_folder, context.spec).to("cpu", torch.float32)
    trainer = Trainer(
        draft=new_draft(context, vocab, teacher),
        teacher=teacher,
        vocab=vocab,
        train_states=stores["train"],
        held_out_states=stores["held_out"],
        settings=config.train,
        seed=config.seed,
        num_draft_tokens=config.evaluate.num_draft_tokens,
        root=context.folder("train"),
        device=torch.device(context.device),
    )
    with Trackers(
        config.train.trackers, config.run_dir, dict(flatten(config.model_dump(mode="json")))
    ) as trackers:
        trainer.watch = trackers.log
        trainer.run()
    best = best_checkpoint(context.folder("train"))
    assert best is not None
    checkpoint = read_checkpoint(best)
    finish(
        context,
        "train",
        [checkpoint.step, trainer.settings_fingerprint, trainer.train_states.fingerprint],
        best_step=checkpoint.step,
        num_steps=len(trainer.batches),
        acceptance_length=trainer.best,
        history=trainer.history,
        coverage=coverage(counts, vocab),
    )
    say(f"train: best validation acceptance length {trainer.best:.2f} at step {checkpoint.step}")
    next_command(context, "train")


def new_draft(context: RunContext, vocab: VocabMap, teacher: TeacherHead) -> Eagle3Draft:
    """Build a draft of the configured shape that starts from the target's own weights."""
    draft = Eagle3Draft(draft_config(context, len(vocab)))
    norm = teacher.norm_weight + (1.0 if teacher.norm_kind == "rms_one_plus" else 0.0)
    rows = teacher.head[torch.from_numpy(vocab.target_ids)]
    layer = family_of(context.spec.architecture).layer.format(context.spec.num_layers - 1)
    last_layer = read_layer(context.target_folder, layer)
    draft.initialise(teacher.embedding, rows, norm, last_layer, context.config.seed)
    return draft


def draft_config(context: RunContext, vocab_size: int) -> DraftConfig:
    """Return the configured shape of the draft.

    Raises: UserError when heads do not divide.
    """
    shape = context.config.draft
    return draft_config_for(
        context.spec,
        vocab_size,
        shape.intermediate_size,
        shape.num_attention_heads,
        shape.num_key_value_heads,
        shape.fc_norm,
        shape.norm_output,
    )


def check_same_target(stored: TargetSpec, asked: TargetSpec) -> None:
    """Refuse states of another target, naming what differs.

    Raises: UserError.
    """
    if stored.fingerprint == asked.fingerprint:
        return
    before, now = stored.to_json(), asked.to_json()
    key = next(k for k in before if before[k] != now[k] and k not in ("model", "revision"))
    raise UserError(
        f"the states were written for another target: {key} is {before[key]} there and {now[key]} here",
        hint="extract again for this target: eyas extract --fresh",
    )
