"""Which way in a version and a target get, and what is refused before anything is loaded."""

import importlib.metadata

import pytest

from eyas.engines.vllm import versions
from eyas.engines.vllm.versions import check_parallel, choose_way, installed_version, parse, remarks
from eyas.errors import UserError
from eyas.types import TargetSpec
from vllm_cases import make_model, spec_of_model


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> TargetSpec:
    return spec_of_model(make_model(tmp_path_factory.mktemp("model")), (1, 2))


def of(spec: TargetSpec, **changes: object) -> TargetSpec:
    return TargetSpec.from_json(spec.to_json() | changes)


@pytest.mark.parametrize(
    ("version", "way"), [((0, 16), "worker"), ((0, 23), "worker"), ((0, 24), "native"), ((0, 32), "native")]
)
def test_the_facility_is_used_from_the_version_on_that_has_it(
    spec: TargetSpec, version: tuple[int, int], way: str
) -> None:
    assert choose_way("auto", version, spec, 1) == way


def test_versions_that_lose_deepseeks_last_layer_get_hooks_or_a_refusal(spec: TargetSpec) -> None:
    kimi = of(spec, architecture="DeepseekV3ForCausalLM")
    assert choose_way("auto", (0, 24), kimi, 8) == "worker"
    assert choose_way("auto", (0, 25), kimi, 8) == "native"
    with pytest.raises(UserError, match=r"vLLM 0.24 leaves out the final layer") as error:
        choose_way("native", (0, 24), kimi, 8)
    assert "pip install" in str(error.value.hint)


def test_hybrid_models_are_refused_where_their_states_are_zero_or_ranks_fail(spec: TargetSpec) -> None:
    hybrid = of(spec, architecture="Qwen3NextForCausalLM")
    assert choose_way("auto", (0, 24), hybrid, 1) == "worker"
    assert choose_way("auto", (0, 26), hybrid, 1) == "native"
    assert choose_way("auto", (0, 26), hybrid, 2) == "worker"


def test_layer_0_of_deepseek_is_refused_natively(spec: TargetSpec) -> None:
    deepseek = of(spec, architecture="DeepseekV3ForCausalLM", aux_layer_ids=[0, 2])
    with pytest.raises(UserError, match="crashes on layer id 0"):
        choose_way("auto", (0, 32), deepseek, 1)
    assert choose_way("worker", (0, 32), deepseek, 1) == "worker"


def test_heads_that_do_not_divide_are_refused_with_what_would_do(spec: TargetSpec) -> None:
    smollm2 = of(spec, num_attention_heads=9, num_key_value_heads=3)
    with pytest.raises(UserError, match="9 attention heads and 3 key/value heads") as error:
        check_parallel(smollm2, 2)
    assert error.value.hint == "set vllm.tensor_parallel_size to one of [1, 3, 9]"
    check_parallel(smollm2, 3)


@pytest.mark.parametrize("text", ["0.15.1", "unknown"])
def test_versions_before_hooks_work_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="too old or unknown"):
        parse(text)


def test_local_version_parts_are_read_over() -> None:
    assert parse("0.26.0+cu130") == (0, 26)


def test_the_cpu_build_that_wants_preloaded_libraries_is_refused_without_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(versions, "is_installed", lambda: True)
    monkeypatch.setattr(versions, "is_cpu_build", lambda: True)
    monkeypatch.setattr(versions.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.18.1")
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libtcmalloc_minimal.so.4")
    with pytest.raises(
        UserError, match=r"0\.18 starts only with libtcmalloc and libiomp in LD_PRELOAD"
    ) as error:
        installed_version()
    assert "or pip install" in str(error.value.hint)
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libtcmalloc_minimal.so.4:/env/lib/libiomp5.so")
    assert installed_version() == (0, 18)
    monkeypatch.setenv("LD_PRELOAD", "")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.19.1")
    assert installed_version() == (0, 19)


def test_doctor_is_told_what_a_version_lacks() -> None:
    assert remarks((0, 20)) == ["captures with hooks only", "does not serve drafts"]
    assert remarks((0, 22)) == ["captures with hooks only"]
    (told,) = remarks((0, 25))
    assert "several tensor-parallel ranks" in told
    assert remarks((0, 30)) == []
