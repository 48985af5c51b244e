"""Every recipe loads, and Kimi-K2.5's says what its target is."""

from pathlib import Path

import pytest

from eyas.config.load import load_config
from eyas.drafters.eagle3.config import draft_config_for
from eyas.layer_ids import from_output_of
from kimi_k25 import KIMI
from tiny import make_spec

RECIPES = sorted((Path(__file__).parents[3] / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_loads(path: Path) -> None:
    assert load_config(path).config.run_dir.parent == path.parents[1] / "runs"


def test_the_recipe_for_kimi_captures_what_older_scripts_called_2_30_58_60() -> None:
    config = load_config(next(p for p in RECIPES if p.stem == "kimi-k2.5")).config
    assert config.target.aux_layer_ids is not None
    assert (*config.target.aux_layer_ids, 61) == from_output_of([2, 30, 58, 60])
    assert (config.vllm.tensor_parallel_size, config.vllm.gpu_memory_utilization) == (8, 0.80)
    spec = make_spec(**KIMI, aux_layer_ids=config.target.aux_layer_ids)
    assert spec.bytes_per_token == 57_344


def test_the_draft_for_kimi_has_heads_and_positions_of_its_own() -> None:
    spec = make_spec(**KIMI, aux_layer_ids=(3, 31, 59))
    draft = draft_config_for(spec, 32000)
    assert (draft.num_attention_heads, draft.num_key_value_heads, draft.head_dim) == (56, 8, 128)
    assert draft.num_attention_heads % 8 == draft.num_key_value_heads % 8 == 0  # eight ranks
    assert draft.max_position_embeddings == 262144
    assert draft.rope_parameters == {
        "rope_type": "yarn",
        "rope_theta": 50000.0,
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    }
