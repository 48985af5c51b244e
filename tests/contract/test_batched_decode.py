"""Decoding many prompts at once, as benchmarks/acceptance.py does, is decoding them one by one."""

from pathlib import Path
from typing import Any

import pytest

from batched_decode import decode
from eyas.drafters.eagle3.propose import DraftChain
from eyas.evaluate.decode import decode_speculative
from eyas.train.loop import Trainer
from tiny import answered_states, make_trainer

LIMIT = 24


@pytest.fixture(scope="module")
def trained(tiny_engine: Any, tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    states = answered_states(tiny_engine, 24, LIMIT)
    root = tmp_path_factory.mktemp("trained")
    trainer = make_trainer(root, tiny_target, states, states[:4], num_epochs=20, learning_rate=1e-2)
    trainer.run()
    return trainer


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 5])
def test_prompts_decoded_together_give_the_text_and_counts_of_each_alone(
    tiny_engine: Any, trained: Trainer, num_draft_tokens: int
) -> None:
    samples = [trained.train_states.read(i).sample for i in range(10)]
    prompts = [s.input_ids[: int(s.loss_mask.argmax())].tolist() for s in samples]
    together = decode(tiny_engine, trained.draft, trained.target_ids, prompts, num_draft_tokens, LIMIT)
    assert sum(a.acceptance.accepted_at[0] for a in together) > 10
    for prompt, found in zip(prompts, together, strict=True):
        chain = DraftChain(trained.draft, trained.target_ids)
        eos = tiny_engine.spec.eos_token_ids
        alone = decode_speculative(tiny_engine.session(), chain, prompt, num_draft_tokens, LIMIT, eos)
        assert found.token_ids == alone.token_ids
        assert found.acceptance == alone.acceptance
