"""Serve, plan, extract and vLLM get one answer to what a target is, for every family and oddity."""

import importlib.util
import json
import shutil
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from click.testing import CliRunner

from eyas.cli import cli
from eyas.config.schema import TargetSettings
from eyas.drafters.eagle3.config import draft_config_for
from eyas.drafters.eagle3.model import Eagle3Draft
from eyas.engines.transformers.engine import TransformersEngine
from eyas.engines.vllm.engine_args import Plan, engine_arguments
from eyas.errors import UserError
from eyas.export.native import NativeExporter
from eyas.plan.target_size import read_target_size
from eyas.stages.extract_flags import settings_from_flags
from eyas.targets.resolve_model import locate_config, locate_description
from eyas.targets.spec import UNKNOWN, read_outline, read_target
from eyas.targets.teacher import read_teacher
from eyas.targets.tokenizer import read_tokenizer
from eyas.types import TargetSpec, VocabMap
from families import TINY, make_family
from oddities import ODDITIES, dtype_at, edit, edit_text, one_id_more, template_of_processor
from tiny import random_samples, spec_of

WRAPPED = sorted(name for name, tiny in TINY.items() if tiny.vision is not None)
CASES = [
    pytest.param(name, oddity, id=f"{name}-{oddity}")
    for oddity, one in ODDITIES.items()
    for name in (WRAPPED if one.wrapped else [one.family])
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {name: make_family(root / name, name) for name in TINY}


@pytest.fixture
def odd(folders: dict[str, Path], tmp_path: Path) -> Any:
    def make(name: str, oddity: str) -> Path:
        folder = Path(shutil.copytree(folders[name], tmp_path / "target"))
        ODDITIES[oddity].change(folder)
        return folder

    return make


def shape_of(spec: TargetSpec) -> dict[str, Any]:
    """Return what an outline knows of a target too."""
    unknown = ("eos_token_ids", "tied_head", "model", "revision")
    return {k: v for k, v in spec.to_json().items() if k not in unknown and not k.endswith("fingerprint")}


def assert_all_agree(folder: Path) -> None:
    """Compare the verbs' readings of a target."""
    spec = spec_of(folder)
    settings = TargetSettings(model=str(folder))
    planned = read_target_size(settings)
    assert planned.trouble is None
    assert planned.spec == spec
    assert shape_of(read_outline(folder, settings)) == shape_of(spec)
    words = settings_from_flags({"model_path": str(folder), "layer_ids": str(spec.num_layers)}, ())
    assert f"target.aux_layer_ids=[{spec.num_layers}]" in [w.replace(" ", "") for w in words]
    with pytest.raises(UserError, match=f"{spec.num_layers}"):
        settings_from_flags({"model_path": str(folder), "layer_ids": str(spec.num_layers + 1)}, ())
    arguments = engine_arguments(vllm_plan(folder, spec), folder, on_cpu=True)
    assert arguments["dtype"] == spec.dtype
    teacher = read_teacher(folder, spec)
    assert teacher.head.shape == (spec.vocab_size, spec.hidden_size)


def vllm_plan(folder: Path, spec: TargetSpec) -> Plan:
    from eyas.config.schema import VllmSettings

    return Plan(folder, spec, VllmSettings(), 128, 256, 4, False, None)


def assert_serve_accepts(folder: Path, draft: Path) -> None:
    spec = spec_of(folder)
    vocab = VocabMap(torch.arange(60).numpy(), spec.vocab_size)
    draft.mkdir()
    NativeExporter("eagle3").write(draft, Eagle3Draft(draft_config_for(spec, len(vocab))), spec, vocab)
    done = CliRunner().invoke(cli, ["serve", str(draft), "--print"])
    assert done.exit_code == 0, done.stderr
    words = done.stdout.split()
    assert words[words.index("--dtype") + 1] == spec.dtype


@pytest.mark.parametrize("name", sorted(TINY))
def test_every_verb_reads_the_same_target(folders: dict[str, Path], tmp_path: Path, name: str) -> None:
    assert_all_agree(folders[name])
    assert_serve_accepts(folders[name], tmp_path / "draft")


@pytest.mark.parametrize(("name", "oddity"), CASES)
def test_every_verb_reads_the_same_oddity(odd: Any, tmp_path: Path, name: str, oddity: str) -> None:
    folder = odd(name, oddity)
    if refused := ODDITIES[oddity].refused:
        with pytest.raises(UserError, match=refused):
            spec_of(folder)
        return
    assert_all_agree(folder)
    assert_serve_accepts(folder, tmp_path / "draft")


# ------------------------------------------------------------- the right answers
@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize(("top", "text"), [("bfloat16", None), (None, "bfloat16"), ("bfloat16", "float32")])
def test_the_type_is_the_configs_wherever_it_stands(
    folders: dict[str, Path], tmp_path: Path, name: str, key: str, top: str | None, text: str | None
) -> None:
    folder = Path(shutil.copytree(folders[name], tmp_path / "target"))
    dtype_at(folder, top=top, text=text, key=key)
    assert spec_of(folder).dtype == "bfloat16"


@pytest.mark.parametrize("name", ["llama", *WRAPPED])
def test_where_no_config_names_a_type_the_weights_do(odd: Any, name: str) -> None:
    assert spec_of(odd(name, "dtype nowhere")).dtype == "bfloat16"


def test_a_type_that_states_are_not_computed_in_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders["llama"], tmp_path / "target"))
    edit(folder, dtype="float64")
    with pytest.raises(UserError, match="names the type float64") as caught:
        spec_of(folder)
    assert "target.dtype" in str(caught.value.hint)
    assert read_target(folder, TargetSettings(model="x", dtype="float32")).dtype == "float32"


def test_a_text_config_without_vocab_size_has_its_classs(tmp_path: Path) -> None:
    """As gemma-3-4b-it is published: its own draft was refused by serve."""
    small = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32}
    folder = make_family(tmp_path / "gemma", "gemma3-wrapped", 3, vocab_size=262208, **small)
    edit_text(folder, vocab_size=None)
    assert "vocab_size" not in json.loads((folder / "config.json").read_text())["text_config"]
    assert spec_of(folder).vocab_size == 262208
    assert_all_agree(folder)
    assert_serve_accepts(folder, tmp_path / "draft")


@pytest.mark.parametrize("name", WRAPPED)
def test_a_head_tied_in_text_config_only_is_tied_and_computed_so(odd: Any, name: str) -> None:
    folder = odd(name, "tied in text_config")
    spec = spec_of(folder)
    assert spec.tied_head
    engine, teacher = TransformersEngine(folder, spec), read_teacher(folder, spec)
    (states,) = engine.capture(random_samples(1, 300))
    ids = torch.from_numpy(states.sample.input_ids).long()[None]
    own = engine.model(input_ids=ids, use_cache=False).logits[0][torch.from_numpy(states.sample.supervised)]
    torch.testing.assert_close(teacher.logits(states.last), own, rtol=2e-4, atol=2e-4)


def test_a_wrappers_own_ends_of_an_answer_count(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders["gemma3-wrapped"], tmp_path / "target"))
    edit(folder, eos_token_id=[1, 106])
    assert set(spec_of(folder).eos_token_ids) >= {1, 106}


def test_named_templates_and_the_processors_are_the_ones_of_the_row(odd: Any) -> None:
    tokenizer = read_tokenizer(odd("llama", "named templates"))
    assert set(tokenizer.chat_template) == {"default", "tool_use"}
    assert tokenizer.get_chat_template(None, [{}]).startswith("{{ tools }}")


# ------------------------------------------------------------- places
@pytest.mark.parametrize("oddity", sorted(set(ODDITIES) - {"adapter"}))
def test_a_target_at_a_url_or_the_hub_is_the_folders(
    odd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, oddity: str
) -> None:
    folder = odd(ODDITIES[oddity].family, oddity)
    spec = spec_of(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = f"file://{folder}"
    assert read_target(locate_description(url), TargetSettings(model=url)).fingerprint == spec.fingerprint
    planned = read_target_size(TargetSettings(model=url))
    assert (planned.trouble, planned.spec.fingerprint) == (None, spec.fingerprint)
    # The hub's cache holds what was downloaded before: all of it, or config.json alone.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshot = tmp_path / "hub" / "models--owner--whole" / "snapshots" / ("0" * 40)
    shutil.copytree(folder, snapshot)
    in_hub(snapshot)
    assert read_target_size(TargetSettings(model="owner/whole")).spec.fingerprint == spec.fingerprint
    alone = tmp_path / "hub" / "models--owner--config" / "snapshots" / ("0" * 40)
    alone.mkdir(parents=True)
    shutil.copy(folder / "config.json", alone)
    in_hub(alone)
    sized = read_target_size(TargetSettings(model="owner/config", dtype=spec.dtype))
    assert not sized.is_here
    assert sized.spec.weights_fingerprint == UNKNOWN
    assert shape_of(sized.spec) == shape_of(spec)


def in_hub(snapshot: Path) -> None:
    """Make a folder the newest revision in the hub's cache."""
    refs = snapshot.parents[1] / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text(snapshot.name)


# ------------------------------------------------------------- adapters
@pytest.mark.parametrize("kind", ["alone", "with a config", "in a whole model", "of mlx", "damaged"])
def test_an_adapter_is_refused_at_once_by_every_verb_and_place(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "adapter"
    if kind == "in a whole model":
        shutil.copytree(folders["llama-tied"], folder)
    folder.mkdir(exist_ok=True)
    if kind == "with a config":
        shutil.copy(folders["llama-tied"] / "config.json", folder)
    names = {"of mlx": {"model": "a/base"}}.get(kind, {"base_model_name_or_path": "a/base"})
    (folder / "adapter_config.json").write_text("{" if kind == "damaged" else json.dumps(names))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    what = "is an adapter of " + ("another model" if kind == "damaged" else "a/base")
    settings = TargetSettings(model=str(folder))
    for ask in (
        lambda: locate_config(str(folder)),
        lambda: locate_description(str(folder)),
        lambda: locate_description(f"file://{folder}"),
        lambda: read_target_size(settings),
        lambda: read_target(folder, settings),
        lambda: settings_from_flags({"model_path": str(folder), "layer_ids": "2"}, ()),
    ):
        with pytest.raises(UserError, match=what) as caught:
            ask()
        assert "merge it first" in str(caught.value.hint)


def test_an_adapter_at_the_hub_is_refused_although_it_has_no_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshot = tmp_path / "hub" / "models--owner--lora" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "adapter_config.json").write_text('{"base_model_name_or_path": "a/base"}')
    in_hub(snapshot)
    with pytest.raises(UserError, match="owner/lora is an adapter of a/base"):
        locate_config("owner/lora")


# ------------------------------------------------------------- vLLM's own readers
vllm_is_here = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")


def vllm_reads(folder: Path) -> dict[str, Any]:
    """Return vLLM's answers, by its own functions, in a process of their own; nothing is started.

    What these leave behind changes how vLLM loads a later test's DeepSeek-V3.
    """
    import vllm.config  # noqa: F401  the other modules need it first

    with ProcessPoolExecutor(1, get_context("fork")) as pool:
        return pool.submit(_vllm_reads, folder).result()


def _vllm_reads(folder: Path) -> dict[str, Any]:
    from vllm.transformers_utils import model_arch_config_convertor as convertors
    from vllm.transformers_utils.config import get_config, get_hf_text_config

    config = get_config(str(folder), trust_remote_code=False)
    kind = convertors.MODEL_ARCH_CONFIG_CONVERTORS.get(
        config.model_type, convertors.ModelArchConfigConvertorBase
    )
    found = kind(config, get_hf_text_config(config)).convert()
    dtype = kind.get_torch_dtype(config, str(folder), revision=None, config_format="hf")
    return {
        "hidden_size": found.hidden_size,
        "vocab_size": found.vocab_size,
        "num_layers": found.total_num_hidden_layers,
        "num_attention_heads": found.total_num_attention_heads,
        "num_key_value_heads": found.total_num_kv_heads,
        "head_dim": found.head_size,
        "dtype": str(dtype).removeprefix("torch."),
    }


@vllm_is_here
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(TINY))
def test_vllm_reads_the_same_shape_and_type(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")  # otherwise it names the latent's width as a head's
    found, spec = vllm_reads(folders[name]), spec_of(folders[name]).to_json()
    assert found == {key: spec[key] for key in found}


@vllm_is_here
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "oddity"), [c for c in CASES if c.values[1] != "adapter"])
def test_vllm_reads_the_same_oddity(
    odd: Any, monkeypatch: pytest.MonkeyPatch, name: str, oddity: str
) -> None:
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    folder = odd(name, oddity)
    found, spec = vllm_reads(folder), spec_of(folder).to_json()
    assert found == {key: spec[key] for key in found}


@vllm_is_here
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "kind", ["plain", "only the processor's", "both", "jinja and json", "named", "in its config"]
)
def test_the_template_is_the_one_that_vllm_renders_with(
    folders: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    import vllm.config  # noqa: F401
    from transformers import AutoTokenizer
    from vllm.renderers.hf import resolve_chat_template

    folder = Path(shutil.copytree(folders["llama"], tmp_path / "target"))
    template = (folder / "chat_template.jinja").read_text()
    if kind in ("only the processor's", "both"):
        template_of_processor(folder, tokenizers=kind == "both")
    elif kind in ("jinja and json", "in its config"):
        template_of_processor(folder, tokenizers=True)
        (folder / "chat_template.jinja").write_text(template)
        if kind == "in its config":
            edit(folder, "processor_config.json", processor_class="Qwen2AudioProcessor", chat_template="P")
    elif kind == "named":
        ODDITIES["named templates"].change(folder)
    ours = read_tokenizer(folder)
    config = SimpleNamespace(
        tokenizer_revision=None,
        code_revision=None,
        trust_remote_code=False,
        tokenizer=str(folder),
        model=str(folder),
        hf_config=SimpleNamespace(model_type="llama"),
    )
    for tools in (None, [{"type": "function", "function": {"name": "look"}}]):
        theirs = resolve_chat_template(
            AutoTokenizer.from_pretrained(folder), None, tools, model_config=config
        )
        if kind == "only the processor's" and tools:
            assert theirs is None  # vLLM has none for tools then; a row with tools is checked against ours
            continue
        assert ours.get_chat_template(None, tools) == theirs


def test_a_tokenizer_with_one_id_more_than_the_embedding_is_the_targets(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(folders["gemma3"], tmp_path / "target"))
    one_id_more(folder)
    assert len(read_tokenizer(folder)) == 301
    assert spec_of(folder).vocab_size == 300
