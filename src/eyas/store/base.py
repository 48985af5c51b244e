"""What a trainer reads hidden states from."""

from collections.abc import Sequence
from typing import Protocol

from eyas.types import HiddenStates, TargetSpec, TokenizedSample


class StateReader(Protocol):
    """Random access to the hidden states of one split."""

    spec: TargetSpec
    fingerprint: str

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens of each sample, by index."""
        ...

    def read(self, index: int) -> HiddenStates: ...

    def sample(self, index: int) -> TokenizedSample:
        """Return the tokens of a sample without its states."""
        ...
