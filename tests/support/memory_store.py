"""Hidden states held in memory."""

from collections.abc import Sequence

from eyas.files import fingerprint
from eyas.types import HiddenStates, TargetSpec, TokenizedSample


class MemoryStore:
    """A StateReader over a list."""

    def __init__(self, spec: TargetSpec, states: Sequence[HiddenStates]) -> None:
        self.spec = spec
        self.states = list(states)
        self.fingerprint = fingerprint([[s.sample.sample_id, s.sample.input_ids.tolist()] for s in states])

    @property
    def lengths(self) -> Sequence[int]:
        return [len(s.sample) for s in self.states]

    def read(self, index: int) -> HiddenStates:
        return self.states[index]

    def sample(self, index: int) -> TokenizedSample:
        return self.states[index].sample
