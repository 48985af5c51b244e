"""Replay of stored states is what decoding accepts, with the norms of EAGLE-3.1, on both training paths."""

from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.drafters.common.acceptance import Acceptance, replay_answers
from eyas.drafters.common.batch import pack_batch
from eyas.drafters.common.teacher_targets import teacher_targets
from eyas.drafters.eagle3.fused.unroll import FusedUnroll
from eyas.drafters.eagle3.propose import DraftChain
from eyas.drafters.eagle3.ttt_rows import rows_of
from eyas.drafters.eagle3.unroll import run_unroll
from eyas.evaluate.decode import decode_speculative
from tiny import answered_states, make_trainer

LIMIT, K = 24, 4


@pytest.mark.parametrize(
    "shape",
    [{"fc_norm": True}, {"norm_output": True}, {"fc_norm": True, "norm_output": True}],
    ids=["fc_norm", "norm_output", "both"],
)
def test_replay_is_decoding_for_eagle_3_1(
    tiny_engine: Any, tiny_target: Path, tmp_path: Path, shape: dict[str, bool]
) -> None:
    states = answered_states(tiny_engine, 20, LIMIT)
    trainer = make_trainer(
        tmp_path, tiny_target, states, states[:4], num_epochs=15, learning_rate=1e-2, **shape
    )
    trainer.run()
    draft, ids, eos = trainer.draft, trainer.target_ids, tiny_engine.spec.eos_token_ids
    prompts = [s.sample.input_ids[: int(s.sample.loss_mask.argmax())].tolist() for s in states]
    alone = Acceptance.empty(K)
    for prompt in prompts:
        found = decode_speculative(tiny_engine.session(), DraftChain(draft, ids), prompt, K, LIMIT, eos)
        assert found.acceptance is not None
        alone += found.acceptance

    batch = pack_batch(states, rows_of(K), torch.device("cpu"), torch.float32)
    targets = teacher_targets(trainer.teacher, batch.last, ids, trainer.vocab.is_full, False)
    with torch.no_grad():
        results = [
            run_unroll(draft, trainer.teacher, ids, batch, 1.0),
            FusedUnroll(draft, torch.float32).run(batch, targets, ids, 1.0, "kl", with_gradients=False),
        ]
    for result in results:
        replayed = Acceptance.empty(K)
        for one in replay_answers(batch.plan.rows[0], result.accepted, result.depth, K, LIMIT):
            replayed += one
        assert replayed == alone
    assert alone.length > 1.2
