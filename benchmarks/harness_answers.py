"""The stored answers of a run, and the part of them that a budget of tokens pays for."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from eyas.stages.run_context import RunContext
from eyas.store.aux_subset import with_layers
from eyas.store.base import StateReader
from eyas.types import HiddenStates, TokenizedSample


@dataclass
class Answers:
    """A run whose states are stored, as every recipe sees it."""

    run_file: Path
    context: RunContext

    @cached_property
    def train(self) -> StateReader:
        return with_layers(self.context.store("train"), self.context.draft_spec.aux_layer_ids)

    @cached_property
    def held_out(self) -> StateReader:
        return with_layers(self.context.store("held_out"), self.context.draft_spec.aux_layer_ids)

    @property
    def lengths(self) -> Sequence[int]:
        return self.train.lengths


@dataclass(frozen=True)
class Budget:
    """Tokens that are trained on, prompts included, epochs counted each time."""

    num_tokens: int


@dataclass(frozen=True)
class Chosen:
    indices: tuple[int, ...]  # of training answers
    num_tokens: int  # of them, once
    num_epochs: int


def choose(answers: Answers, budget: Budget) -> Chosen:
    """Take as many answers for as few epochs as the budget allows, in one order for all recipes and seeds."""
    lengths = answers.lengths
    num_epochs = max(1, math.ceil(budget.num_tokens / sum(lengths)))
    room = budget.num_tokens / num_epochs
    indices: list[int] = []
    taken = 0
    for index in np.random.default_rng(0).permutation(len(lengths)).tolist():
        if taken + lengths[index] / 2 > room:
            break
        indices.append(index)
        taken += lengths[index]
    return Chosen(tuple(sorted(indices)), taken, num_epochs)


class Part:
    """A StateReader over some samples of another."""

    def __init__(self, states: StateReader, indices: Sequence[int]) -> None:
        self.states, self.indices = states, indices
        self.spec, self.fingerprint = states.spec, states.fingerprint

    @property
    def lengths(self) -> Sequence[int]:
        return [self.states.lengths[i] for i in self.indices]

    def read(self, index: int) -> HiddenStates:
        return self.states.read(self.indices[index])

    def sample(self, index: int) -> TokenizedSample:
        return self.states.sample(self.indices[index])
