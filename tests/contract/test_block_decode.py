"""Offline acceptance of blocks from stored states is what decoding here accepts, on every prompt."""

from pathlib import Path
from typing import Any

import pytest
import torch

from block_training import Trained, train_block_draft
from eyas.drafters.common.block.propose import BlockProposer
from eyas.errors import UserError
from eyas.evaluate.decode import decode_speculative

KINDS: dict[str, dict[str, Any]] = {
    "dflash": {"name": "dflash"},
    "dflash, bidirectional, window of a block": {"name": "dflash", "causal": False, "sliding_window": 8},
    "dflash, part of the vocabulary": {"name": "dflash", "vocab_size": 120},
    "dspark": {"name": "dspark"},
    "dspark, part of the vocabulary, window of 12": {
        "name": "dspark", "vocab_size": 120, "sliding_window": 12,
    },
}  # fmt: skip


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS)
def trained(request: pytest.FixtureRequest, tiny_target: Path) -> Trained:
    return train_block_draft(tiny_target, **request.param)


def test_replay_of_stored_states_equals_decoding_on_every_prompt(trained: Trained) -> None:
    predictions = trained.draft.config.num_predictions
    found = []
    for num_draft_tokens in (predictions, 3, 1):
        for state in trained.answers:
            sample = state.sample
            start = int(sample.loss_mask.argmax())
            limit = len(sample) - start
            replayed = trained.replayed(state, num_draft_tokens)
            decoded = decode_speculative(
                trained.engine.session(),
                BlockProposer(trained.draft, trained.target_ids),
                sample.input_ids[:start].tolist(),
                num_draft_tokens,
                limit,
                trained.spec.eos_token_ids,
            )
            assert decoded.token_ids == sample.input_ids[start:].tolist()
            assert decoded.acceptance == replayed
            found.append(replayed.length)
    assert max(found) > 1.5, "a draft that is never right proves nothing"


def test_more_draft_tokens_than_a_block_holds_are_refused(trained: Trained) -> None:
    aux = trained.answers[0].aux[:3]
    most = trained.draft.config.num_predictions
    with pytest.raises(UserError, match=f"holds {most} draft tokens, {most + 1} were asked for"):
        BlockProposer(trained.draft, trained.target_ids).propose(aux, [1, 2, 3], most + 1)


@torch.no_grad()
def test_fewer_draft_tokens_are_the_first_of_the_same_block(trained: Trained) -> None:
    state, most = trained.answers[1], trained.draft.config.num_predictions
    following = state.sample.input_ids[1:6].tolist()

    def propose(num: int) -> list[int]:
        return BlockProposer(trained.draft, trained.target_ids).propose(state.aux[:5], following, num)

    whole = propose(most)
    assert [propose(num) for num in range(1, most)] == [whole[:num] for num in range(1, most)]
