"""Every kind of export decodes in the real vLLM as it does here: same text, rounds and accepted tokens.

An engine that is given other layer ids, another vocabulary or too few fields does not; that shows too.
"""

import importlib.util
import json
import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas import registry
from eyas.config.schema import VllmSettings
from eyas.drafters.common.acceptance import Acceptance
from eyas.drafters.eagle3 import vllm
from eyas.drafters.eagle3.propose import DraftChain
from eyas.engines.base import Prompt, Sampling
from eyas.engines.spec_decode_metrics import SpecCounters
from eyas.engines.transformers.engine import TransformersEngine
from eyas.evaluate.decode import decode_plain, decode_speculative
from eyas.export.native import load_export
from eyas.targets.teacher import read_teacher
from families import TINY
from tiny import VOCAB_SIZE, answered_states, make_target, make_trainer, spec_of

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # vLLM's own, while it is imported and started
    pytest.mark.xdist_group("vllm"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]
K, NUM_TOKENS, NUM_PROMPTS = 3, 32, 6


@dataclass(frozen=True)
class Kind:
    """One way of exporting; together they take every option."""

    aux_layer_ids: tuple[int, ...] = (2, 4, 5)
    vocab_size: int = 120
    tied: bool = False
    format: str = "native"
    include_embedding: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    hidden_size: int | None = None
    first_length: int = 6  # of the prompts
    num_layers: int = 1
    target: Mapping[str, Any] = field(default_factory=dict)  # what its target has of its own
    attention: Literal["gqa", "mla"] = "gqa"
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    window: int | None = None  # in tokens, fewer than most contexts have

    @property
    def prompts(self) -> list[Prompt]:
        lengths = [self.first_length + 3 * i for i in range(NUM_PROMPTS)]
        return [
            Prompt(f"p{i}", tuple(5 + (7 * i + 3 * j) % 90 for j in range(length)))
            for i, length in enumerate(lengths)
        ]


# Positions stretched from 1024 to 4096.
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 1024}

# The one latent that vLLM's kernels for it take on a CPU: 512 and 64, as in the released models.
DEEPSEEK = {
    **TINY["deepseek-v3"].settings,
    "model_type": "deepseek_v3",
    "hidden_size": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "head_dim": 64,
    "initializer_range": 0.1,
    "rope_parameters": {
        **YARN,
        "original_max_position_embeddings": 128,
        "mscale": 0.8,
        "mscale_all_dim": 1.0,
    },
}

KINDS = {
    "native, three aux layers, part of the vocabulary": Kind(),
    "two aux layers, fc_norm, the whole vocabulary": Kind((3, 5), VOCAB_SIZE, fc_norm=True),
    "five aux layers, norm_output, tied target, own embedding": Kind(
        (1, 2, 3, 4, 5), tied=True, include_embedding=True, norm_output=True
    ),
    "speculators format, four aux layers, EAGLE-3.1, a window": Kind(
        (1, 3, 4, 5), format="speculators", fc_norm=True, norm_output=True, window=12
    ),
    "two layers with a window, norms as speculators' trainer has them": Kind(
        num_layers=2, window=9, norm_before_residual=True, norm_before_fc=True, norm_output=True
    ),
    "wider than its target, beyond 2048 positions by YaRN": Kind(hidden_size=64, first_length=2040),
    "latent attention, on a target that has it": Kind(target=DEEPSEEK, attention="mla"),
}


@dataclass(frozen=True)
class Exported:
    target: Path
    folder: Path
    prompts: list[Prompt]
    answers: dict[str, list[int]]  # the target's own
    acceptance: Acceptance  # as decoded here


def make(root: Path, kind: Kind) -> Exported:
    """Train a draft of this kind for a few steps, export it, decode with it here."""
    positions = {"max_position_embeddings": 4096, "rope_parameters": YARN} if kind.first_length > 512 else {}
    target = make_target(root / "target", tied=kind.tied, **positions, **kind.target)
    spec = spec_of(target, kind.aux_layer_ids)
    engine = TransformersEngine(target, spec)
    states = answered_states(engine, 40, 20)
    trainer = make_trainer(
        root / "checkpoints", target, states[4:], states[:4], kind.vocab_size, spec=spec, num_epochs=6,
        learning_rate=6e-3, fc_norm=kind.fc_norm, norm_output=kind.norm_output, hidden_size=kind.hidden_size,
        num_layers=kind.num_layers, attention=kind.attention,
        norm_before_residual=kind.norm_before_residual, norm_before_fc=kind.norm_before_fc,
        sliding_window=kind.window,
    )  # fmt: skip
    trainer.run()
    folder = root / "draft"
    folder.mkdir()
    exporter = registry.resolve(registry.EXPORTERS, kind.format, "exporter")("eagle3")
    exporter.write(folder, trainer.draft, spec, trainer.vocab, kind.include_embedding)
    one = states[0]
    tokens = torch.from_numpy(np.append(one.sample.input_ids[1:], 0)).long()
    exporter.verify(folder, trainer.draft, trainer.vocab, one.aux, tokens)

    draft, target_ids, _ = load_export(folder, read_teacher(target, spec).embedding.float())
    total, unbounded, answers = Acceptance.empty(K), Acceptance.empty(K), {}
    for prompt in kind.prompts:
        ids = list(prompt.token_ids)
        chain = DraftChain(draft, target_ids)
        decoded = decode_speculative(engine.session(), chain, ids, K, NUM_TOKENS, spec.eos_token_ids)
        plain = decode_plain(engine.session(), ids, NUM_TOKENS, spec.eos_token_ids)
        assert decoded.token_ids == plain.token_ids
        assert decoded.acceptance is not None
        answers[prompt.prompt_id] = plain.token_ids
        total += decoded.acceptance
        if kind.window is not None:
            chain = DraftChain(draft, target_ids)
            chain.verified.window = None
            decoded = decode_speculative(engine.session(), chain, ids, K, NUM_TOKENS, spec.eos_token_ids)
            assert decoded.acceptance is not None
            unbounded += decoded.acceptance
    engine.close()
    assert unbounded != total, "a window that changes nothing proves nothing"
    assert total.length > 1.1, "a draft that is never right proves nothing"
    return Exported(target, folder, kind.prompts, answers, total)


def decode_in_vllm(
    exported: Exported, folder: Path, in_process: bool = True
) -> tuple[dict[str, list[int]], SpecCounters]:
    from eyas.engines.vllm.decoder import VllmDecoder

    decoder = VllmDecoder(
        exported.target,
        spec_of(exported.target),
        draft=folder,
        num_draft_tokens=K,
        kind=vllm,
        settings=VllmSettings(),
        max_length=max(len(p.token_ids) for p in exported.prompts) + 64,
        max_concurrency=8,
        in_process=in_process,
    )
    with closing(decoder):
        before = decoder.counters()
        served = decoder.answer(exported.prompts, 8, Sampling(NUM_TOKENS))
        counted = decoder.counters() - before
    return {name: list(answer.token_ids) for name, answer in served.answers.items()}, counted


@pytest.fixture(scope="module")
def plain_kind(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return make(tmp_path_factory.mktemp("plain"), Kind())


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_vllm_accepts_the_draft_tokens_that_eyas_accepts(
    tmp_path: Path, plain_kind: Exported, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind.attention == "mla":
        # vLLM's kernels for it have hung once (docs/reference/vllm-versions.md), which nothing here can end.
        if not os.environ.get("EYAS_TEST_VLLM_MLA"):
            pytest.skip("vLLM's latent attention may hang on a CPU; EYAS_TEST_VLLM_MLA=1 runs it")
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
    exported = plain_kind if kind == Kind() else make(tmp_path, kind)
    answers, counted = decode_in_vllm(exported, exported.folder, in_process=kind.attention != "mla")
    ours = exported.acceptance
    assert answers == exported.answers
    # Rounds are the same; of a request's last one vLLM also counts what it accepts behind its end.
    assert counted.rounds == ours.num_rounds
    assert counted.accepted_at is not None
    surplus = [e - o for e, o in zip(counted.accepted_at, ours.accepted_at, strict=True)]
    assert all(0 <= s <= NUM_PROMPTS for s in surplus)
    low, high = counted.lengths(sum(map(len, answers.values())), NUM_PROMPTS)
    assert low <= ours.length <= high


def copy_with(exported: Exported, folder: Path, d2t: Any = None, **changes: Any) -> Path:
    """Copy an export with something wrong in it."""
    tensors = load_file(exported.folder / "model.safetensors")
    if d2t is not None:
        tensors["d2t"] = d2t(tensors["d2t"])
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((exported.folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


def test_a_shuffled_d2t_still_gives_the_targets_text_but_shows_in_the_counters(
    tmp_path: Path, plain_kind: Exported
) -> None:
    wrong = copy_with(plain_kind, tmp_path / "wrong", d2t=lambda ids: ids.flip(0) % 30)
    answers, counted = decode_in_vllm(plain_kind, wrong)
    assert answers == plain_kind.answers
    assert counted.lengths(sum(map(len, answers.values())), NUM_PROMPTS)[1] < plain_kind.acceptance.length


def test_layer_ids_that_engines_would_default_to_show_in_the_counters(
    tmp_path: Path, plain_kind: Exported
) -> None:
    # Without the top-level list vLLM takes its own default in silence: other layers than were trained on.
    wrong = copy_with(plain_kind, tmp_path / "wrong", eagle_aux_hidden_state_layer_ids=[1, 3, 4])
    answers, counted = decode_in_vllm(plain_kind, wrong)
    assert answers == plain_kind.answers
    assert counted.rounds != plain_kind.acceptance.num_rounds
