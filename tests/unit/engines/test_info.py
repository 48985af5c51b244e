"""Facts of engines are read without starting or importing them."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from eyas import registry
from eyas.config.load import load_config
from eyas.engines.info import EngineInfo, draft_troubles, engine_info, engines_that
from eyas.layer_ids import ReadLayers
from tiny import make_spec

CONFIG = load_config(None, ("run_dir=r", "target.model=m", "data.sources=[a]")).config


def test_facts_of_all_engines_load_no_slow_library() -> None:
    code = (
        "import sys\n"
        "from eyas.engines.info import engines_that\n"
        "engines_that(lambda info: True)\n"
        "slow = {'torch', 'transformers', 'vllm', 'sglang', 'numpy'} & set(sys.modules)\n"
        "assert not slow, slow"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@pytest.mark.parametrize("name", sorted(registry.ENGINES))
def test_an_engine_is_registered_under_its_own_name_and_its_classes_exist(name: str) -> None:
    info = engine_info(name)
    assert info.name == name
    assert (info.engine is not None) == (info.captures or info.generates)
    if name == "vllm":
        pytest.importorskip("vllm", reason="vllm is not installed")
    for target in filter(None, (info.engine, info.decoder)):
        assert isinstance(registry.load(target), type)


def test_engines_are_found_by_what_they_can() -> None:
    assert [i.name for i in engines_that(lambda i: i.captures)] == ["fake", "transformers", "vllm"]
    assert [i.name for i in engines_that(lambda i: i.serves)] == ["sglang", "vllm"]
    assert [i.name for i in engines_that(lambda i: i.decoder)] == ["sglang", "vllm"]
    assert [i.name for i in engines_that(lambda i: i.takes_arrivals)] == ["vllm"]


def test_an_engine_of_this_process_takes_the_weights_and_one_batch() -> None:
    spec = make_spec()
    info, target = EngineInfo("e", "E"), SimpleNamespace(spec=spec, weight_bytes=1000)
    row = (spec.num_aux_layers + 3) * spec.hidden_size + 3 * spec.intermediate_size
    assert info.memory(CONFIG, target)[0] == 1000 + 4096 * 4 * row  # type: ignore[arg-type]
    assert (info.gpus(CONFIG), info.memory_share(CONFIG), info.in_actor(CONFIG)) == (0, 0.0, CONFIG)


LAYERS = ReadLayers((2, 4, 5), "LlamaForCausalLM", 8)


def test_only_sglang_has_trouble_with_a_draft_of_another_norm_order() -> None:
    shape = SimpleNamespace(
        norm_before_residual=False,
        norm_before_fc=False,
        has_own_embedding=False,
        latent_attention=None,
        num_layers=1,
        num_aux_layers=3,
        sliding_window=64,
    )
    assert draft_troubles("eagle3", shape, LAYERS) == {}
    shape.norm_before_fc = True
    assert list(draft_troubles("eagle3", shape, LAYERS)) == ["SGLang"]
