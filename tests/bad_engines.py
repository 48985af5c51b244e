"""Engines that do what engines have done wrong, for the extract stage to refuse."""

import dataclasses
import re
from collections.abc import Iterable, Iterator

import torch

from eyas.engines.transformers import TransformersEngine
from eyas.types import Failure, HiddenStates, TokenizedSample


class Bad(TransformersEngine):
    """Passes any probe, and then spoils one item of each call: the first of the run's own samples."""

    def capture(self, samples: Iterable[TokenizedSample]) -> Iterator[HiddenStates | Failure]:
        spoiled = False
        for item in super().capture(samples):
            # The runs of these tests name their conversations c0, c1, ...
            if isinstance(item, HiddenStates) and not spoiled and re.match(r"c\d+", item.sample.sample_id):
                spoiled = True
                yield from self.spoil(item)
            else:
                yield item

    def spoil(self, item: HiddenStates) -> Iterator[HiddenStates | Failure]:
        raise NotImplementedError


class Failing(Bad):
    def spoil(self, item: HiddenStates) -> Iterator[HiddenStates | Failure]:
        yield Failure(item.sample.sample_id, "out of memory")


class Losing(Bad):
    def spoil(self, item: HiddenStates) -> Iterator[HiddenStates | Failure]:
        yield from ()


class Doubling(Bad):
    def spoil(self, item: HiddenStates) -> Iterator[HiddenStates | Failure]:
        yield item
        yield item


class Renaming(Bad):
    def spoil(self, item: HiddenStates) -> Iterator[HiddenStates | Failure]:
        yield dataclasses.replace(item, sample=dataclasses.replace(item.sample, sample_id="warm-up"))


class Echoing(Bad):
    """Returns the states of other tokens."""

    def spoil(self, item: HiddenStates) -> Iterator[HiddenStates | Failure]:
        ids = item.sample.input_ids.copy()
        ids[0] = (ids[0] + 1) % self.spec.vocab_size
        yield dataclasses.replace(item, sample=dataclasses.replace(item.sample, input_ids=ids))


class NotFinite(Bad):
    def spoil(self, item: HiddenStates) -> Iterator[HiddenStates | Failure]:
        aux = item.aux.clone()
        aux[-1, 0, 0] = float("nan")
        yield dataclasses.replace(item, aux=aux)


class ZeroLayer(Bad):
    def spoil(self, item: HiddenStates) -> Iterator[HiddenStates | Failure]:
        aux = item.aux.clone()
        aux[:, 1] = 0
        yield dataclasses.replace(item, aux=aux)


class ZeroLast(Bad):
    def spoil(self, item: HiddenStates) -> Iterator[HiddenStates | Failure]:
        yield dataclasses.replace(item, last=torch.zeros_like(item.last))


class OneLayerOfThree(Bad):
    def spoil(self, item: HiddenStates) -> Iterator[HiddenStates | Failure]:
        yield dataclasses.replace(item, aux=item.aux[:, :1])
