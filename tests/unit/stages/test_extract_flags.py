"""Flags that people know become settings; layer ids become ours."""

import json
from pathlib import Path

import pytest

from eyas.engines.vllm.engine_args import further_arguments
from eyas.errors import UserError
from eyas.stages.extract_flags import settings_from_flags


@pytest.fixture
def kimi(tmp_path: Path) -> str:
    """A folder that says as much as a multimodal model of 61 layers does."""
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"num_hidden_layers": 61}}))
    return str(tmp_path)


def test_a_known_command_line_becomes_settings(kimi: str) -> None:
    flags = {
        "model_path": kimi,
        "prepared_data": "data.jsonl",
        "output_dir": "out",
        "batch_size": 16,
        "max_seq_len": 4096,
        "tp_size": 8,
        "gpu_memory_utilization": 0.8,
        "engine": "vllm",
        "layer_ids": "2",
        "layer_id_convention": "output-of",
    }
    assert set(settings_from_flags(flags, ("30", "58", "60", "seed=1"))) == {
        "seed=1",
        f"target.model={kimi}",
        "extract.prepared_data=data.jsonl",
        "regenerate.enabled=false",
        "data.sources=[]",
        "run_dir=out",
        "extract.batch_size=16",
        "data.max_length=4096",
        "vllm.tensor_parallel_size=8",
        "vllm.gpu_memory_utilization=0.8",
        "extract.engine=vllm",
        # 2 30 58 60 there are 3 31 59 61 here, and 61 is the last, which is always stored.
        "target.aux_layer_ids=[3, 31, 59]",
    }


def test_without_flags_the_settings_are_the_words() -> None:
    none = {"layer_ids": None, "engine": None, "layer_id_convention": None}
    assert settings_from_flags(none, ("seed=1",)) == ("seed=1",)


def test_layer_ids_are_ours_unless_said_otherwise(kimi: str) -> None:
    flags = {"model_path": kimi, "layer_ids": "2,30,58"}
    assert "target.aux_layer_ids=[2, 30, 58]" in settings_from_flags(flags, ())


@pytest.mark.parametrize(
    ("flags", "words", "message"),
    [
        ({"layer_ids": "62"}, (), "aux layer id 62 is out of range: the target has 61 layers"),
        ({"layer_ids": "61", "layer_id_convention": "output-of"}, (), "62 is out of range"),
        ({"layer_ids": "2", "layer_id_convention": "output_of"}, (), "did you mean 'output-of'"),
        ({"layer_ids": "two"}, (), "cannot read the layer ids 'two'"),
        ({}, ("30", "58"), "cannot read '30'"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    kimi: str, flags: dict[str, str], words: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        settings_from_flags({"model_path": kimi} | flags, words)


def test_further_arguments_of_vllm_are_read_as_yaml_and_may_not_undo_ours() -> None:
    words = ("attention_backend=FLASH_ATTN", "max_logprobs=5", "hf_overrides={a: 1}")
    found = further_arguments(words, {"dtype": "float32"})
    assert found == {"attention_backend": "FLASH_ATTN", "max_logprobs": 5, "hf_overrides": {"a": 1}}
    with pytest.raises(UserError, match="may not set dtype"):
        further_arguments(("dtype=float16",), {"dtype": "float32"})
    with pytest.raises(UserError, match="cannot read 'enforce-eager'"):
        further_arguments(("enforce-eager",), {})
