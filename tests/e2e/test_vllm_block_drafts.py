"""DFlash drafts decode in the real vLLM as stored states foretell: same text, rounds and accepted tokens.

vLLM's CPU build runs DFlash and refuses DSpark by name, which is proved by decoding here.
"""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from block_exports import write_trained
from block_training import Trained, train_block_draft
from eyas.drafters.common.acceptance import Acceptance
from eyas.drafters.dflash import vllm as dflash_vllm
from eyas.engines.spec_decode_metrics import SpecCounters, from_vllm

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # vLLM's own, while it is imported and started
    pytest.mark.xdist_group("vllm"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]


def norm_each_layers_context_keys(model: Any, keys: torch.Tensor) -> torch.Tensor:
    """Do what vLLM's GPU kernel does; its CPU kernel takes the first layer's weight for all layers."""
    from vllm import _custom_ops

    out = torch.empty_like(keys)
    for normed, of_layer, weight in zip(out, keys, model._k_norm_weights, strict=True):
        _custom_ops.rms_norm(normed, of_layer.contiguous(), weight, model._rms_norm_eps)
    return out


@contextmanager
def vllm_with(trained: Trained, folder: Path, num_draft_tokens: int) -> Iterator[Any]:
    """Start vLLM in this process with the draft; its engine stops behind the block."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    if trained.draft.config.num_layers > 1:
        DFlashQwen3Model._normalize_context_k = norm_each_layers_context_keys
    llm = LLM(
        model=str(trained.target),
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_batched_tokens=512,
        max_num_seqs=8,
        kv_cache_memory_bytes=1 << 26,
        disable_log_stats=False,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        seed=0,
        speculative_config=dflash_vllm.speculative_config(str(folder), num_draft_tokens),
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


def decode(llm: Any, trained: Trained) -> tuple[list[list[int]], SpecCounters]:
    from vllm import SamplingParams

    prompts, params = [], []
    for state in trained.answers:
        sample = state.sample
        start = int(sample.loss_mask.argmax())
        prompts.append({"prompt_token_ids": sample.input_ids[:start].tolist()})
        params.append(
            SamplingParams(
                max_tokens=len(sample) - start,
                temperature=0.0,
                stop_token_ids=list(trained.spec.eos_token_ids),
                detokenize=False,
            )
        )
    before = from_vllm(llm.get_metrics())
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(o.outputs[0].token_ids) for o in outputs], from_vllm(llm.get_metrics()) - before


def replayed(trained: Trained, num_draft_tokens: int) -> Acceptance:
    total = Acceptance.empty(num_draft_tokens)
    for state in trained.answers:
        total += trained.replayed(state, num_draft_tokens)
    return total


CASES: dict[str, tuple[dict[str, Any], Literal["native", "speculators"], int]] = {
    "native, causal, window smaller than prompt and answer": ({"sliding_window": 12}, "native", 7),
    "speculators format, part of the vocabulary": ({"vocab_size": 150}, "speculators", 7),
    "native, every slot sees its whole block": ({"causal": False, "sliding_window": None}, "native", 7),
    "native, fewer draft tokens than the block holds": ({}, "native", 3),
    "native, one layer, as vLLM's CPU build is": ({"num_layers": 1}, "native", 7),
}


@pytest.mark.parametrize(("settings", "form", "num"), CASES.values(), ids=CASES)
def test_vllm_accepts_the_draft_tokens_that_replay_of_stored_states_accepts(
    tmp_path: Path, tiny_target: Path, settings: dict[str, Any], form: Any, num: int
) -> None:
    trained = train_block_draft(tiny_target, "dflash", **settings)
    folder = write_trained(tmp_path / "draft", trained, form)
    ours = replayed(trained, num)
    assert ours.length > 1.5, "a draft that is never right proves nothing"
    with vllm_with(trained, folder, num) as llm:
        answers, counted = decode(llm, trained)
    for state, answer in zip(trained.answers, answers, strict=True):
        assert answer == state.sample.input_ids[state.sample.loss_mask].tolist()
    assert counted.rounds == ours.num_rounds
    assert counted.accepted_at is not None
    # Of a request's last round vLLM also counts what it accepts behind its end.
    surplus = [e - o for e, o in zip(counted.accepted_at, ours.accepted_at, strict=True)]
    assert all(0 <= s <= len(answers) for s in surplus)
    low, high = counted.lengths(sum(map(len, answers)), len(answers))
    assert low <= ours.length <= high
