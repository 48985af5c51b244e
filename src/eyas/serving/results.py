"""What an evaluation has measured so far: kept after each engine, so that the same command goes on.

An engine takes minutes to start, a large target's many; what interrupts an evaluation costs one of them.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eyas.engines.base import Prompt
from eyas.engines.spec_decode_metrics import SpecCounters
from eyas.files import read_json, seal, unseal, write_json
from eyas.serving.arrivals import ArrivalPoint
from eyas.serving.recommend import ServingPoint
from eyas.typed_json import parse
from eyas.types import Conversation

SO_FAR = "so-far.json"
HELD_OUT = "held out"  # the suite of the run's own prompts

Answers = dict[str, tuple[int, ...]]  # token ids by prompt
Samples = dict[str, list[tuple[int, ...]]]  # token ids of several answers, by prompt


@dataclass
class Group:
    """Prompts of one suite and category; ``dialogues`` become prompts as the target answers them."""

    suite: str
    category: str
    prompts: list[Prompt] = field(default_factory=list)
    dialogues: list[Conversation] = field(default_factory=list)


@dataclass
class ServingResults:
    """``left_out`` counts the turns that do not fit; ``done`` are the K and baselines already measured."""

    groups: list[Group]
    left_out: int = 0
    done: list[int | str] = field(default_factory=list)
    points: list[ServingPoint] = field(default_factory=list)
    categories: list[dict[str, Any]] = field(default_factory=list)
    arrivals: list[ArrivalPoint] = field(default_factory=list)
    # The engine's model runner with each K (0: the target alone) and baseline, None where it does not say.
    runners: dict[str, str | None] = field(default_factory=dict)
    # Greedy answers by concurrency: of the target alone, and of each K.
    alone: dict[int, Answers] = field(default_factory=dict)
    drafted: dict[tuple[int, int], Answers] = field(default_factory=dict)
    # Greedy answers to held-out prompts one at a time, with what the engine counted for each.
    singly: dict[str, tuple[tuple[int, ...], SpecCounters]] = field(default_factory=dict)
    # First tokens of many sampled answers, by K (0: the target alone) and temperature.
    sampled: dict[tuple[int, float], Samples] = field(default_factory=dict)

    @property
    def prompts(self) -> list[Prompt]:
        return [prompt for group in self.groups for prompt in group.prompts]

    def save(self, path: Path, conditions: Mapping[str, Any]) -> None:
        """Write everything but the target alone, whose engine is needed to the end."""
        saved = _Saved(
            [dataclasses.replace(group, dialogues=[]) for group in self.groups],
            self.left_out,
            self.done,
            self.points,
            self.arrivals,
            self.categories,
            self.runners,
            [(k, concurrency, answers) for (k, concurrency), answers in self.drafted.items()],
            self.singly,
            [(k, temperature, samples) for (k, temperature), samples in self.sampled.items()],
        )
        write_json(path, seal({"conditions": conditions, "measured": dataclasses.asdict(saved)}))

    @classmethod
    def load(cls, path: Path, conditions: Mapping[str, Any]) -> "ServingResults | None":
        """Return what was measured under the same ``conditions``, if anything was."""
        try:
            kept = unseal(read_json(path))
            if kept["conditions"] != conditions:
                return None
            saved = parse(_Saved, kept["measured"])
            return cls(
                saved.groups,
                saved.left_out,
                saved.done,
                saved.points,
                [row | {"acceptance_length": _pair(row["acceptance_length"])} for row in saved.categories],
                arrivals=saved.arrivals,
                runners=saved.runners,
                drafted={(k, concurrency): answers for k, concurrency, answers in saved.drafted},
                singly=saved.singly,
                sampled={(k, temperature): samples for k, temperature, samples in saved.sampled},
            )
        except (OSError, ValueError, LookupError, TypeError):  # nothing there, or not as it was written
            return None


@dataclass(frozen=True)
class _Saved:
    """What a file holds of ``ServingResults``: JSON has no pairs as keys."""

    groups: list[Group]
    left_out: int
    done: list[int | str]
    points: list[ServingPoint]
    arrivals: list[ArrivalPoint]
    categories: list[dict[str, Any]]
    runners: dict[str, str | None]
    drafted: list[tuple[int, int, Answers]]
    singly: dict[str, tuple[tuple[int, ...], SpecCounters]]
    sampled: list[tuple[int, float, Samples]]


def _pair(length: list[float] | None) -> tuple[float, ...] | None:
    return None if length is None else tuple(length)
