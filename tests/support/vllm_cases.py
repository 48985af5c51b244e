"""Random targets that vLLM's CPU build can run (head width 32 and above), and what they should give.

Those of further architectures are in families.py.
"""

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from eyas.engines.transformers.engine import TransformersEngine
from eyas.engines.vllm.versions import installed_version, native_trouble
from eyas.types import Failure, HiddenStates, TargetSpec, TokenizedSample

VOCAB_SIZE, NUM_LAYERS = 512, 4


def make_model(folder: Path, model_type: str = "llama", **settings: Any) -> Path:
    """Write a random model and return its folder; norms that are not ones, so that each one shows."""
    shape = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "initializer_range": 0.1,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **(shape | settings))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Add a tokenizer of one word an id and a chat template, which a stage asks of a target."""
    vocab = {f"w{i}": i for i in range(VOCAB_SIZE)}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocab, unk_token="w0")), bos_token="w1", eos_token="w2"
    )
    fast.chat_template = "{% for message in messages %}{{ message['content'] }} w2 {% endfor %}"
    fast.save_pretrained(folder)


def spec_of_model(folder: Path, aux_layer_ids: tuple[int, ...], dtype: str = "float32") -> TargetSpec:
    """Describe a model that has no tokenizer."""
    config = json.loads((folder / "config.json").read_text())
    return TargetSpec(
        model=str(folder),
        revision=None,
        architecture=config["architectures"][0],
        hidden_size=config["hidden_size"],
        vocab_size=config["vocab_size"],
        num_layers=config["num_hidden_layers"],
        aux_layer_ids=aux_layer_ids,
        dtype=dtype,
        norm_kind="rms",
        norm_eps=config["rms_norm_eps"],
        logit_softcap=None,
        logit_scale=1.0,
        tied_head=config["tie_word_embeddings"],
        eos_token_ids=(2,),
        tokenizer_fingerprint="none",
        template_fingerprint="none",
        weights_fingerprint="random",
        num_attention_heads=config["num_attention_heads"],
        num_key_value_heads=config["num_key_value_heads"],
        head_dim=config.get("head_dim", 32),
        intermediate_size=config["intermediate_size"],
        max_position_embeddings=config["max_position_embeddings"],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )


def skip_where_refused(capture: str, spec: TargetSpec, num_ranks: int = 1) -> None:
    """Skip a test of the native way under a vLLM that eyas refuses it for (see vllm_matrix.py)."""
    trouble = native_trouble(installed_version(), spec, num_ranks) if capture == "native" else None
    if trouble:
        pytest.skip(f"refused: this vLLM {trouble}")


def sample_of(sample_id: str, ids: Sequence[int] | np.ndarray) -> TokenizedSample:
    """Return a sample every row of which is asked for."""
    return TokenizedSample(
        sample_id, np.asarray(ids, dtype=np.int32), np.ones(len(ids), dtype=bool), cut=True
    )


def mixed_samples(
    lengths: Sequence[int], seed: int = 0, vocab_size: int = VOCAB_SIZE
) -> list[TokenizedSample]:
    rng = np.random.default_rng(seed)
    return [sample_of(f"s{i}", rng.integers(3, vocab_size, n)) for i, n in enumerate(lengths)]


def states_by_id(items: Any) -> dict[str, torch.Tensor]:
    """Return [T, A + 1, D] of each sample; a failure or a second item of one sample fails the test."""
    out: dict[str, torch.Tensor] = {}
    for item in items:
        assert isinstance(item, HiddenStates), item
        assert not isinstance(item, Failure)
        assert item.sample.sample_id not in out
        out[item.sample.sample_id] = torch.cat([item.aux, item.last[:, None]], dim=1).clone()
    return out


def reference_states(
    folder: Path, spec: TargetSpec, samples: Sequence[TokenizedSample]
) -> dict[str, torch.Tensor]:
    engine = TransformersEngine(folder, spec)
    out = states_by_id(engine.capture(samples))
    engine.close()
    return out


def worst_difference(found: dict[str, torch.Tensor], known: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of a sample's layer, relative to that layer."""
    assert found.keys() == known.keys()
    worst = 0.0
    for sample_id, one in found.items():
        two = known[sample_id].float()
        assert one.shape == two.shape
        difference = (one.float() - two).norm(dim=(0, 2)) / two.norm(dim=(0, 2))
        assert difference.isfinite().all(), f"states of {sample_id} are not finite"
        worst = max(worst, float(difference.amax()))
    return worst
