"""Engines that do what engines have done wrong, for the extract stage to refuse."""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from eyas.engines.base import Prompt, Sampling
from eyas.engines.info import EngineInfo
from eyas.engines.transformers.engine import TransformersEngine
from eyas.types import Completion, Failure, HiddenStates, TokenizedSample


class Bad(TransformersEngine):
    """Passes any probe, and then spoils one item of each call: the first of the run's own samples that
    has at least ``rows`` supervised rows."""

    rows = 1

    def capture(self, samples: Iterable[TokenizedSample]) -> Iterator[HiddenStates | Failure]:
        spoiled = False
        for item in super().capture(samples):
            # The runs of these tests name their conversations c0, c1, ...
            own = isinstance(item, HiddenStates) and re.match(r"c\d+", item.sample.sample_id)
            if isinstance(item, HiddenStates) and own and not spoiled and len(item.last) >= self.rows:
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


class Swapping(Bad):
    """Returns the states of another request, cut to the right shape."""

    rows = 8

    def spoil(self, item: HiddenStates) -> Iterator[HiddenStates | Failure]:
        ids = item.sample.input_ids
        other = dataclasses.replace(item.sample, input_ids=(ids[::-1] * 7 + 3) % self.spec.vocab_size)
        (wrong,) = self._capture_batch([other])
        yield dataclasses.replace(item, aux=wrong.aux, last=wrong.last)


class RepeatingALayer(Bad):
    def spoil(self, item: HiddenStates) -> Iterator[HiddenStates | Failure]:
        yield dataclasses.replace(item, aux=item.aux[:, [0, 0, 2]])


class DroppingARow(Bad):
    """Loses a row in the middle and fills up with the last one, as a padded batch does."""

    def spoil(self, item: HiddenStates) -> Iterator[HiddenStates | Failure]:
        rows = [*range(3), *range(4, len(item.sample)), len(item.sample) - 1]
        yield dataclasses.replace(item, aux=item.aux[rows])


class LosingARow(Bad):
    def spoil(self, item: HiddenStates) -> Iterator[HiddenStates | Failure]:
        yield HiddenStates(item.sample, item.aux[1:], item.last)


class ReturningAShard(Bad):
    """Returns one tensor-parallel rank's half of the width."""

    def spoil(self, item: HiddenStates) -> Iterator[HiddenStates | Failure]:
        half = item.aux.shape[2] // 2
        yield dataclasses.replace(item, aux=item.aux[..., :half], last=item.last[..., :half])


class AddingWarmUpRows(Bad):
    """Rows of a warm-up batch come first, so each of its own rows stands one too late."""

    rows = 8

    def spoil(self, item: HiddenStates) -> Iterator[HiddenStates | Failure]:
        other = dataclasses.replace(item.sample, input_ids=item.sample.input_ids * 0 + 7)
        (warm_up,) = self._capture_batch([other])
        yield dataclasses.replace(
            item,
            aux=torch.cat([warm_up.aux[:1], item.aux[:-1]]),
            last=torch.cat([warm_up.last[:1], item.last[:-1]]),
        )


class NormingTheLast(Bad):
    def spoil(self, item: HiddenStates) -> Iterator[HiddenStates | Failure]:
        yield dataclasses.replace(item, last=self.model.get_decoder().norm(item.last))


class ReturningAnAuxLayerAsLast(Bad):
    def spoil(self, item: HiddenStates) -> Iterator[HiddenStates | Failure]:
        rows = torch.from_numpy(item.sample.supervised)
        yield dataclasses.replace(item, last=item.aux[rows, 2])


class LeavingRowsEmpty(Bad):
    def spoil(self, item: HiddenStates) -> Iterator[HiddenStates | Failure]:
        aux = item.aux.clone()
        aux[4] = 0
        yield dataclasses.replace(item, aux=aux)


class Always(TransformersEngine):
    """Wrong from the start, also for the probe's samples."""

    def capture(self, samples: Iterable[TokenizedSample]) -> Iterator[HiddenStates | Failure]:
        yield from (self.spoil(i) for i in super().capture(samples) if isinstance(i, HiddenStates))

    def spoil(self, item: HiddenStates) -> HiddenStates:
        raise NotImplementedError


class AlwaysNormed(Always):
    def spoil(self, item: HiddenStates) -> HiddenStates:
        return dataclasses.replace(item, last=self.model.get_decoder().norm(item.last))


class AlwaysShifted(Always):
    """Off by one row."""

    def spoil(self, item: HiddenStates) -> HiddenStates:
        return dataclasses.replace(item, last=item.last.roll(1, 0))


class OffByOneLayer(TransformersEngine):
    """Captures the input of each layer where its output was asked for."""

    def _capture_batch(self, batch: Sequence[TokenizedSample]) -> Iterator[HiddenStates]:
        asked = self.spec
        self.spec = dataclasses.replace(asked, aux_layer_ids=tuple(i - 1 for i in asked.aux_layer_ids))
        try:
            yield from super()._capture_batch(batch)
        finally:
            self.spec = asked


class WithAnotherRope(TransformersEngine):
    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        rotary = self.model.get_decoder().rotary_emb
        rotary.inv_freq = rotary.inv_freq * 0.5


class Crashing(TransformersEngine):
    """Dies in the middle of its work, as a worker that ran out of memory does."""

    num_captured = 0

    def capture(self, samples: Iterable[TokenizedSample]) -> Iterator[HiddenStates | Failure]:
        for item in super().capture(samples):
            own = isinstance(item, HiddenStates) and re.match(r"c\d+", item.sample.sample_id)
            self.num_captured += bool(own)
            if self.num_captured == 5:
                raise RuntimeError("CUDA error: out of memory")
            yield item

    def generate(self, prompts: Iterable[Prompt], sampling: Sampling) -> Iterator[Completion | Failure]:
        for number, item in enumerate(super().generate(prompts, sampling)):
            if number == 5:
                raise RuntimeError("CUDA error: out of memory")
            yield item


def _info_of(engine: type) -> EngineInfo:
    return EngineInfo(
        engine.__name__,
        engine.__name__,
        engine=f"{__name__}:{engine.__name__}",
        captures=True,
        generates=True,
        opens_sessions=True,
    )


# What the registry names: "bad_engines:CrashingInfo" for the class Crashing.
for _engine in [value for value in list(globals().values()) if isinstance(value, type)]:
    if issubclass(_engine, TransformersEngine):
        globals()[f"{_engine.__name__}Info"] = _info_of(_engine)
