"""The ids in an export make SGLang's own functions capture the layers that the draft reads, for every family.

SGLang does not run on a CPU; its model classes' methods are taken out of its source and run on stand-ins.
Its folder is that of the installed package; EYAS_TEST_SGLANG names those of further versions, with colons.
"""

import ast
import importlib.util
import os
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eyas.drafters.common.sglang_layers import (
    eagle3_ids,
    eagle3_layers_trouble,
    layers_trouble,
    oldest_for_eagle3,
)
from eyas.errors import UserError
from eyas.layer_ids import ReadLayers
from families import TINY

METHOD = "set_eagle3_layers_to_capture"


def folders() -> list[Path]:
    found = importlib.util.find_spec("sglang")
    here = [Path(p).parent for p in (found.submodule_search_locations or ())] if found else []
    return here + [Path(p) for p in os.environ.get("EYAS_TEST_SGLANG", "").split(":") if p]


FOLDERS = folders()
needs_sglang = pytest.mark.skipif(
    not FOLDERS, reason="sglang is not installed, and EYAS_TEST_SGLANG is empty"
)
KIMI = ReadLayers((3, 31, 59), "KimiK25ForConditionalGeneration", 61)


@cache
def classes_of(models: Path) -> dict[str, tuple[ast.ClassDef, list[str]]]:
    """Return every class of the model files by name, with the names of its bases."""
    found = {}
    for path in sorted(models.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8-sig"))):
            if isinstance(node, ast.ClassDef):
                found[node.name] = (node, [b.id for b in node.bases if isinstance(b, ast.Name)])
    return found


def method_of(models: Path, name: str) -> ast.FunctionDef | None:
    if name not in classes_of(models):
        return None
    node, bases = classes_of(models)[name]
    for member in node.body:
        if isinstance(member, ast.FunctionDef) and member.name == METHOD:
            return member
    return next((method for base in bases if (method := method_of(models, base))), None)


def captured(folder: Path, architecture: str, ids: tuple[int, ...], num_layers: int) -> list[int] | None:
    """Return what SGLang captures for the ids of a config.json; None: its class has no such method."""
    models = folder / "sglang/srt/models"
    method = method_of(models, architecture)
    if method is None:
        return None
    module = ast.Module([method], [])
    method.returns = None
    for argument in method.args.args:
        argument.annotation = None
    rank = SimpleNamespace(is_last_rank=True)
    scope: dict[str, Any] = {
        "get_pp_group": lambda: rank,
        "get_parallel": lambda: SimpleNamespace(pp_group=rank),
    }
    exec(compile(ast.fix_missing_locations(module), str(models), "exec"), scope)
    model = SimpleNamespace(layers=[SimpleNamespace() for _ in range(num_layers + 1)])
    setattr(model, METHOD, lambda chosen: setattr(model, "layers_to_capture", chosen))
    inner = "DeepseekV3ForCausalLM" if architecture.startswith("Kimi") else None
    this = SimpleNamespace(model=model, pp_group=rank, config=SimpleNamespace(num_hidden_layers=num_layers))
    this.config.text_config = this.config
    if inner or architecture.endswith("ForConditionalGeneration"):
        inside = inner or architecture.replace("ForConditionalGeneration", "ForCausalLM")
        further: list[int] = []
        this.language_model = SimpleNamespace()
        setattr(
            this.language_model,
            METHOD,
            lambda given: further.extend(captured(folder, inside, tuple(given), num_layers) or ()),
        )
        scope[METHOD](this, list(ids))
        return further or getattr(model, "layers_to_capture", None)
    scope[METHOD](this, list(ids))
    return list(model.layers_to_capture)


def version_of(folder: Path) -> tuple[int, ...]:
    from eyas.engines.sglang.info import _numbers

    name = next(folder.glob("sglang-*.dist-info")).name
    return _numbers(name.removeprefix("sglang-"))


@needs_sglang
@pytest.mark.parametrize("folder", FOLDERS, ids=str)
@pytest.mark.parametrize("ids", [(2, 30, 58), (3, 31, 59), (4, 5, 60), (2, 3), (1, 30, 58)], ids=str)
def test_every_family_captures_the_layers_that_the_draft_reads(folder: Path, ids: tuple[int, ...]) -> None:
    tried = 0
    for tiny in TINY.values():
        layers = ReadLayers(ids, tiny.released_as or tiny.architecture, 61)
        found = captured(folder, layers.architecture, eagle3_ids(layers), 61)
        if found is None or version_of(folder) < tuple(map(int, oldest_for_eagle3(layers).split("."))):
            continue
        if eagle3_layers_trouble(layers):
            assert min(found) > 61, layers.architecture
            continue
        assert found == list(ids), layers.architecture
        tried += 1
    assert tried > 5


@needs_sglang
@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_the_layers_of_the_kimi_recipe_are_captured_from_0_5_13_on(folder: Path) -> None:
    assert oldest_for_eagle3(KIMI) == "0.5.13"
    found = captured(folder, KIMI.architecture, eagle3_ids(KIMI), 61)
    assert (found == [3, 31, 59]) == (version_of(folder) >= (0, 5, 13))


def test_deepseek_like_targets_have_their_own_ids_and_none_for_lists_that_begin_with_1() -> None:
    assert eagle3_ids(KIMI) == (3, 31, 59)
    assert eagle3_ids(ReadLayers((2, 30, 58), KIMI.architecture, 61)) == (1, 29, 57)
    assert eagle3_ids(ReadLayers((3, 31, 59), "LlamaForCausalLM", 61)) == (2, 30, 58)
    first = ReadLayers((1, 30, 58), KIMI.architecture, 61)
    assert "adds 1 to a list" in str(eagle3_layers_trouble(first))
    assert layers_trouble(first) is None, "block drafts have ids of their own"
    assert min(eagle3_ids(first)) > first.num_layers
    with pytest.raises(UserError, match="aux layer 0"):
        eagle3_ids(ReadLayers((0, 30, 58), KIMI.architecture, 61))


def test_the_least_version_is_that_of_the_rule_for_the_ids() -> None:
    assert oldest_for_eagle3(KIMI) == "0.5.13"
    assert oldest_for_eagle3(ReadLayers((2, 30, 58), KIMI.architecture, 61)) == "0.5.12"
    assert oldest_for_eagle3(ReadLayers((3, 31, 59), "LlamaForCausalLM", 61)) == "0.5.12"


def test_a_draft_that_reads_the_last_layer_is_not_for_sglang_but_where_its_class_captures_it() -> None:
    assert "does not capture the last layer, 8" in str(
        layers_trouble(ReadLayers((2, 8), "LlamaForCausalLM", 8))
    )
    assert layers_trouble(ReadLayers((2, 8), "GptOssForCausalLM", 8)) is None
    assert layers_trouble(ReadLayers((2, 7), "LlamaForCausalLM", 8)) is None
