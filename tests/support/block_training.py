"""Block drafts trained for a few steps on a tiny target's own answers, by a loop of ten lines."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny import answered_states, spec_of

from eyas.drafters.common.batch import PackedBatch
from eyas.drafters.common.block_anchors import plan_blocks
from eyas.drafters.common.block_config import default_block_layer_ids
from eyas.drafters.common.block_judge import BlockJudge
from eyas.drafters.common.block_model import BlockDraft
from eyas.drafters.common.block_objective import BlockObjective
from eyas.drafters.dflash import config as dflash
from eyas.drafters.dflash.model import DFlashDraft
from eyas.drafters.dflash.settings import Settings as DFlashSettings
from eyas.drafters.dspark import config as dspark
from eyas.drafters.dspark.model import DSparkDraft
from eyas.drafters.dspark.objective import DSparkObjective
from eyas.drafters.dspark.settings import Settings as DSparkSettings
from eyas.engines.transformers import TransformersEngine
from eyas.targets.spec import read_target
from eyas.targets.teacher import TeacherHead, read_teacher
from eyas.types import HiddenStates, TargetSpec, VocabMap

MASK_TOKEN = 299


@dataclass
class Trained:
    """A draft, what it was trained for, and some of the answers that it was trained on."""

    target: Path
    spec: TargetSpec
    engine: TransformersEngine
    teacher: TeacherHead
    draft: BlockDraft
    vocab: VocabMap
    objective: BlockObjective
    answers: list[HiddenStates]

    @property
    def target_ids(self) -> torch.Tensor:
        return torch.from_numpy(self.vocab.target_ids)


def block_batch(states: Sequence[HiddenStates], num_predictions: int, num_anchors: int, draw: int) -> Any:
    """Pack documents one after another with a block plan."""
    lengths = torch.tensor([len(s.sample) for s in states])
    documents = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    starts = torch.cumsum(lengths, 0) - lengths
    supervised = torch.from_numpy(np.concatenate([s.sample.supervised for s in states]))
    return PackedBatch(
        sample_ids=tuple(s.sample.sample_id for s in states),
        tokens=torch.from_numpy(np.concatenate([s.sample.input_ids for s in states])).long(),
        documents=documents,
        positions=torch.arange(len(documents)) - starts[documents],
        aux=torch.cat([s.aux for s in states]),
        last=torch.cat([s.last for s in states]),
        plan=plan_blocks(supervised, documents, num_predictions, num_anchors, draw),  # type: ignore[arg-type]
    )


def make_block_draft(
    name: str, spec: TargetSpec, teacher: TeacherHead, vocab: VocabMap, **settings: Any
) -> tuple[BlockDraft, BlockObjective]:
    """Return a new draft as the kind starts it, and its plain objective."""
    defaults: dict[str, Any] = {"num_layers": 2, "block_size": 8, "num_anchors": 24}
    target_ids = torch.from_numpy(vocab.target_ids)
    judge = BlockJudge(teacher, target_ids)
    draft: BlockDraft
    objective: BlockObjective
    if name == "dflash":
        flash = DFlashSettings(**(defaults | settings))
        draft = DFlashDraft(dflash.config_for(spec, flash, len(vocab), MASK_TOKEN))
        objective = BlockObjective(draft, judge, dflash.mix_of(flash), torch.float32)
    else:
        spark = DSparkSettings(**(defaults | {"markov_rank": 16} | settings))
        draft = DSparkDraft(dspark.config_for(spec, spark, len(vocab), MASK_TOKEN))
        objective = DSparkObjective(
            draft, judge, dspark.mix_of(spark), torch.float32, confidence_weight=spark.confidence_weight
        )
    draft.share(teacher.embedding, teacher.head[target_ids])
    draft.start(teacher.norm_weight, seed=0)
    return draft, objective


def train_block_draft(
    target: Path,
    name: str,
    *,
    num_steps: int = 100,
    vocab_size: int | None = None,
    aux_layer_ids: tuple[int, ...] | None = None,
    max_new_tokens: int = 24,
    learning_rate: float = 3e-3,
    **settings: Any,
) -> Trained:
    from eyas.config.schema import TargetSettings

    num_layers = spec_of(target).num_layers
    ids = aux_layer_ids or default_block_layer_ids(num_layers)
    spec = read_target(target, TargetSettings(model=str(target), aux_layer_ids=ids))
    engine = TransformersEngine(target, spec)
    states = answered_states(engine, 16, max_new_tokens)
    teacher = read_teacher(target, spec).to("cpu", torch.float32)
    if vocab_size is None:
        vocab = VocabMap(np.arange(spec.vocab_size), spec.vocab_size)
    else:
        answered = np.concatenate([s.sample.input_ids[s.sample.loss_mask] for s in states])
        counts = np.bincount(answered, minlength=spec.vocab_size)
        vocab = VocabMap(np.sort(np.argsort(-counts, kind="stable")[:vocab_size]), spec.vocab_size)
    draft, objective = make_block_draft(name, spec, teacher, vocab, **settings)
    optimizer = torch.optim.AdamW(draft.trainable().values(), lr=learning_rate, betas=(0.9, 0.95))
    rng = np.random.default_rng(0)
    for step in range(num_steps):
        chosen = [states[i] for i in rng.choice(len(states), 8, replace=False)]
        batch = block_batch(chosen, draft.config.num_predictions, 24, step)
        draft.zero_grad(set_to_none=True)
        sums = objective.backward(batch)
        for parameter in draft.trainable().values():
            assert parameter.grad is not None
            parameter.grad /= sums[-1].float()
        torch.nn.utils.clip_grad_norm_(draft.trainable().values(), 1.0)
        optimizer.step()
    draft.zero_grad(set_to_none=True)
    return Trained(target, spec, engine, teacher, draft, vocab, objective, states[:8])
