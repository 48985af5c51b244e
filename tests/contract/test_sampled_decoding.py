"""Above temperature 0 this process's decoder samples the target's distribution with a real draft."""

from pathlib import Path
from typing import Any

import pytest

from eyas.drafters.eagle3.propose import DraftChain
from eyas.engines.base import Prompt
from eyas.engines.transformers.engine import TransformersEngine
from eyas.evaluate import sampled
from eyas.evaluate.in_process import sample_here
from tiny import answered_states, make_trainer

PROMPTS = [Prompt("a", (5, 6, 7)), Prompt("b", (9, 4))]


@pytest.fixture(scope="module")
def chain(
    tiny_engine: TransformersEngine, tiny_target: Path, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    states = answered_states(tiny_engine, 8, 12)
    trainer = make_trainer(tmp_path_factory.mktemp("sampled"), tiny_target, states, states[:2])
    return lambda: DraftChain(trainer.draft, trainer.target_ids)


def test_samples_with_a_real_draft_are_the_targets(tiny_engine: TransformersEngine, chain: Any) -> None:
    row = sample_here(tiny_engine, chain, PROMPTS, 2, 0.8, 1, ())
    assert (row["num_draft_tokens"], row["temperature"], row["num_samples"]) == (2, 0.8, 96)
    assert not row["differs"]
    assert row["detectable"] < 1


def test_a_decoder_that_accepts_every_draft_token_is_found(
    tiny_engine: TransformersEngine, chain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def accept(target: Any, proposed: int | None, generator: Any) -> tuple[int, bool]:
        return (proposed, True) if proposed is not None else (int(target.argmax()), False)

    monkeypatch.setattr(sampled, "accept_or_resample", accept)
    assert sample_here(tiny_engine, chain, PROMPTS, 2, 1.0, 1, ())["differs"]
