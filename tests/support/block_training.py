"""Block drafts trained for some steps on a tiny target's own answers, by a loop of ten lines."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eyas import registry
from eyas.config.schema import TargetSettings, TrainSettings, draft_settings_of
from eyas.drafters.common.acceptance import Acceptance, replay_answers
from eyas.drafters.common.batch import PackedBatch, pack_batch
from eyas.drafters.common.block.config import default_block_layer_ids
from eyas.engines.transformers.engine import TransformersEngine
from eyas.targets.spec import read_target
from eyas.targets.teacher import TeacherHead, read_teacher
from eyas.types import HiddenStates, TargetSpec, VocabMap
from tiny import answered_states, spec_of

CPU = torch.device("cpu")


@dataclass
class Trained:
    """A draft, what it was trained for, and some of the answers that it was trained on."""

    name: str
    target: Path
    spec: TargetSpec
    engine: TransformersEngine
    teacher: TeacherHead
    draft: Any
    vocab: VocabMap
    settings: Any
    answers: list[HiddenStates]

    @property
    def drafter(self) -> Any:
        return registry.drafter(self.name)

    @property
    def target_ids(self) -> torch.Tensor:
        return torch.from_numpy(self.vocab.target_ids)

    def batch(self, *states: HiddenStates, draw: int = 0) -> PackedBatch[Any]:
        planner = partial(self.drafter.plan, settings=self.settings, draw=draw)
        return pack_batch(states, planner, CPU, torch.float32)

    def replayed(self, state: HiddenStates, num_draft_tokens: int) -> Acceptance:
        """Say what decoding this answer accepts, from its stored states."""
        limit = len(state.sample) - int(state.sample.loss_mask.argmax())
        rounds = self.drafter.replay(self.draft, self.teacher, self.target_ids, state, num_draft_tokens)
        answers = replay_answers(rounds.rows, rounds.accepted, rounds.depth, num_draft_tokens, limit)
        return answers[0]


def train_block_draft(
    target: Path,
    name: str,
    *,
    num_steps: int = 100,
    aux_layer_ids: tuple[int, ...] | None = None,
    max_new_tokens: int = 24,
    learning_rate: float = 3e-3,
    **settings: Any,
) -> Trained:
    """Train a draft of two layers and eight slots, but for ``settings``, until it knows the answers."""
    ids = aux_layer_ids or default_block_layer_ids(spec_of(target).num_layers)
    spec = read_target(target, TargetSettings(model=str(target), aux_layer_ids=ids))
    engine = TransformersEngine(target, spec)
    states = answered_states(engine, 16, max_new_tokens)
    teacher = read_teacher(target, spec).to("cpu", torch.float32)
    drafter = registry.drafter(name)
    defaults: dict[str, Any] = {"num_layers": 2, "block_size": 8, "num_anchors": 24}
    chosen = draft_settings_of(name)(**(defaults | settings))
    answered = np.concatenate([s.sample.input_ids[s.sample.loss_mask] for s in states])
    counts = np.bincount(answered, minlength=spec.vocab_size)
    ranked = np.argsort(-counts, kind="stable")[: chosen.vocab_size]
    vocab = VocabMap(np.sort(ranked), spec.vocab_size)
    draft = drafter.build(drafter.config_for(spec, chosen, len(vocab)))
    drafter.initialise(draft, target, teacher, spec, vocab, seed=0)
    trained = Trained(name, target, spec, engine, teacher, draft, vocab, chosen, states[:8])
    objective = drafter.objective(
        draft, teacher, trained.target_ids, chosen, TrainSettings(), torch.float32, CPU, sharded=False
    )
    optimizer = torch.optim.AdamW(draft.trainable().values(), lr=learning_rate, betas=(0.9, 0.95))
    rng = np.random.default_rng(0)
    for step in range(num_steps):
        batch = trained.batch(*(states[i] for i in rng.choice(len(states), 8, replace=False)), draw=step)
        objective.start()
        sums = objective.backward(batch)
        for parameter in draft.trainable().values():
            parameter.grad /= sums[-1].float()
        torch.nn.utils.clip_grad_norm_(draft.trainable().values(), 1.0)
        optimizer.step()
    objective.start()
    return trained
