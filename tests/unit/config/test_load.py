from pathlib import Path
from typing import Any

import pytest
import yaml

from eyas.config.explain import describe_keys, to_commented_yaml
from eyas.config.keys import known_keys
from eyas.config.load import flatten, load_config
from eyas.config.schema import ExtractSettings
from eyas.errors import UserError

MINIMAL = "run_dir: runs/x\ntarget: {model: m}\ndata: {sources: [a.jsonl]}\n"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def refusal(tmp_path: Path, text: str, *overrides: str) -> UserError:
    with pytest.raises(UserError) as caught:
        load_config(write(tmp_path, text), overrides)
    assert caught.value.exit_code == 2
    assert caught.value.hint
    assert "\n" not in caught.value.what
    return caught.value


def test_the_command_line_beats_the_file_and_the_file_beats_the_default(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "train: {num_epochs: 5, warmup_share: 0.2}\n")
    loaded = load_config(path, ("train.num_epochs=9",))
    assert (loaded.config.train.num_epochs, loaded.config.train.warmup_share) == (9, 0.2)
    assert loaded.config.train.batch_tokens == 8192
    origins = loaded.origins
    assert origins["train.num_epochs"] == "command line"
    assert origins["train.warmup_share"] == "file"
    assert origins["train.batch_tokens"] == "default"


def test_every_setting_has_an_origin(tmp_path: Path) -> None:
    loaded = load_config(write(tmp_path, MINIMAL))
    assert set(loaded.origins) >= set(known_keys("eagle3"))


def test_a_run_can_be_given_on_the_command_line_alone() -> None:
    loaded = load_config(None, ("run_dir=r", "target.model=m", "data.sources=[a.jsonl]"))
    assert loaded.config.data.sources == ("a.jsonl",)


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("train.learning_rate=1e-4", 1e-4),
        ("train.learning_rate=5E-3", 5e-3),
        ("train.learning_rate=1.0e-3", 1e-3),
        ("draft.ttt_step_loss_decay=1", 1.0),
        ("draft.vocab_size=null", None),
        ("target.aux_layer_ids=[1,2]", (1, 2)),
        ("regenerate.enabled=false", False),
    ],
)
def test_values_on_the_command_line_mean_what_a_person_means(override: str, value: Any) -> None:
    loaded = load_config(None, ("run_dir=r", "target.model=m", "data.sources=[a]", override))
    found = loaded.config.model_dump()
    for part in override.partition("=")[0].split("."):
        found = found[part]
    assert found == value


@pytest.mark.parametrize("text", ["1e-3", "1.0e-3", "0.001"])
def test_an_exponent_in_a_file_is_a_number(tmp_path: Path, text: str) -> None:
    loaded = load_config(write(tmp_path, MINIMAL + f"train: {{learning_rate: {text}}}\n"))
    assert loaded.config.train.learning_rate == 1e-3


@pytest.mark.parametrize(
    ("override", "suggested"),
    [
        ("train.num_epoch=2", "train.num_epochs"),
        ("trian.num_epochs=2", "train.num_epochs"),
        ("learning_rate=2", "train.learning_rate"),
        ("optimizer.learning_rate=1", "train.learning_rate"),
    ],
)
def test_an_unknown_setting_is_refused_with_the_closest_known_one(
    tmp_path: Path, override: str, suggested: str
) -> None:
    error = refusal(tmp_path, MINIMAL, override)
    key = override.partition("=")[0]
    assert error.what == f"unknown setting {key!r}; did you mean {suggested!r}?"
    assert error.hint == "eyas config --keys lists every setting"


def test_an_unknown_setting_in_the_file_is_refused_with_the_closest_known_one(tmp_path: Path) -> None:
    error = refusal(tmp_path, MINIMAL + "train: {batch_token: 9}\n")
    assert error.what == "unknown setting 'train.batch_token'; did you mean 'train.batch_tokens'?"


def test_a_setting_of_a_setting_is_unknown(tmp_path: Path) -> None:
    error = refusal(tmp_path, MINIMAL + "seed: 3\n", "seed.value=1")
    assert error.what.startswith("unknown setting 'seed.value'")


def test_a_missing_setting_is_named(tmp_path: Path) -> None:
    error = refusal(tmp_path, "run_dir: r\ndata: {sources: [a]}\ntarget: {}\n")
    assert error.what == "the setting 'target.model' is missing"


def test_a_bad_value_is_refused_with_key_and_value(tmp_path: Path) -> None:
    error = refusal(tmp_path, MINIMAL, "train.num_epochs=-1")
    assert error.what == "train.num_epochs: Input should be greater than 0 (got -1)"


def test_a_bad_entry_of_a_list_is_named_by_its_setting(tmp_path: Path) -> None:
    error = refusal(tmp_path, MINIMAL, "target.aux_layer_ids=[1,x]")
    assert error.what.startswith("target.aux_layer_ids: ")
    assert "'x'" in error.what


@pytest.mark.parametrize(
    "text",
    [
        "a: [1, 2",
        "",
        "- a\n- b\n",
        "just words",
        "1: 2\n",
        MINIMAL + "train: 3\n",
        MINIMAL + "train: {1: 2}\n",
        MINIMAL + "train:\n",
    ],
    ids=[
        "broken",
        "empty",
        "list",
        "words",
        "number as key",
        "scalar section",
        "nested number",
        "null section",
    ],
)
def test_a_file_that_holds_no_settings_is_refused(tmp_path: Path, text: str) -> None:
    refusal(tmp_path, text)


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(b"\xff\xfe\x00bin")
    with pytest.raises(UserError, match=r"run\.yaml"):
        load_config(path)


@pytest.mark.parametrize("override", ["train.num_epochs", "=3", "train.num_epochs=[1"])
def test_an_override_that_cannot_be_read_is_refused(tmp_path: Path, override: str) -> None:
    assert repr(override) in refusal(tmp_path, MINIMAL, override).what


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read the run file"):
        load_config(tmp_path / "nowhere.yaml")
    with pytest.raises(UserError, match="cannot read the run file"):
        load_config(tmp_path)


def test_the_resolved_configuration_reads_back_as_the_same_configuration(tmp_path: Path) -> None:
    first = load_config(write(tmp_path, MINIMAL), ("train.learning_rate=1e-5", "target.revision='1.0'"))
    text = to_commented_yaml(first)
    again = load_config(write(tmp_path, text))
    assert again.config == first.config
    assert "  learning_rate: 1.0e-05  # command line" in text
    assert yaml.safe_load(text)["train"]["learning_rate"] == 1e-5, "not text, as YAML 1.1 takes 1e-05"
    assert "  num_epochs: 3  # default" in text


def test_every_setting_is_described() -> None:
    rows = describe_keys()
    assert [key for key, _ in rows] == known_keys()
    assert [key for key, text in rows if not text] == []


def test_the_recipes_load(pytestconfig: pytest.Config) -> None:
    recipes = sorted((pytestconfig.rootpath / "recipes").glob("*.yaml"))
    assert recipes
    for recipe in recipes:
        loaded = load_config(recipe)
        assert {key for key, _ in flatten(yaml.safe_load(recipe.read_text()))} <= set(loaded.origins)


@pytest.mark.parametrize(
    ("gpu", "vllm", "engine"),
    [(True, True, "vllm"), (False, True, "transformers"), (True, False, "transformers")],
)
def test_auto_is_vllm_where_it_is_installed_and_a_gpu_is_there(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, vllm: bool, engine: str
) -> None:
    monkeypatch.setattr("eyas.config.schema.Path.exists", lambda self: gpu)
    monkeypatch.setattr("eyas.config.schema.importlib.util.find_spec", lambda name: vllm or None)
    config = load_config(
        None, ("run_dir=r", "target.model=m", "data.sources=[a]", "regenerate.engine=auto")
    ).config
    assert config.regenerate.engine == engine
    assert ExtractSettings(engine="auto").engine == engine
    assert ExtractSettings(engine="toy").engine == "toy"
