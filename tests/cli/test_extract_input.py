"""eyas extract with the flags people know: what cannot work is one line and a remedy, before any loading."""

import json
from pathlib import Path
from typing import Any

import pytest

from eyas.files import read_json, seal, unseal, write_json
from eyas.store.shards import ShardStore
from pipeline import Screen, eyas, write_jsonl
from tiny import make_target

ROWS = [{"id": f"r{i}", "input_ids": list(range(5, 12 + i))} for i in range(12)]


def extract(target: Path, data: Path, out: Path, *further: Any) -> Screen:
    return eyas(
        "extract", "--model-path", target, "--prepared-data", data, "--output-dir", out, "--batch-size", "4",
        "--max-seq-len", "64", "--tp-size", "1", "--gpu-memory-utilization", "0.80", *further,
    )  # fmt: skip


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "data.jsonl", ROWS)


@pytest.fixture(autouse=True)
def _no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing below gets as far as loading a model, but where a test takes this away."""

    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("eyas.engines.transformers.engine.TransformersEngine.__init__", load)
    monkeypatch.setattr("eyas.engines.vllm.engine.Session", load)


def refused(screen: Screen, what: str, hint: str) -> None:
    assert screen.err.splitlines()[-2:] == [f"error: {what}", f"hint: {hint}"], screen.err
    assert screen.code == 2


def test_the_flags_as_people_type_them_give_states_of_the_layers_asked_for(
    tiny_target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    rows = [r | {"loss_mask": [0] * 3 + [1] * (len(r["input_ids"]) - 3)} for r in ROWS]
    write_jsonl(data, rows)
    arguments = ("--layer-ids", "0", "2", "5", "--layer-id-convention", "output-of")
    screen = extract(tiny_target, data, tmp_path / "run", *arguments, "data.validation_fraction=0")
    assert screen.code == 0, screen.err
    store = ShardStore(tmp_path / "run" / "states" / "train")
    assert store.spec.aux_layer_ids == (1, 3)  # and 6, the last, which is always stored
    assert len(store.lengths) == len(ROWS)
    for index in range(len(ROWS)):
        states = store.read(index)
        row = rows[int(states.sample.sample_id[1:])]
        assert states.sample.input_ids.tolist() == row["input_ids"]
        assert states.sample.loss_mask.tolist() == [bool(m) for m in row["loss_mask"]]


def test_a_layer_id_out_of_range(tiny_target: Path, data: Path, tmp_path: Path) -> None:
    refused(
        extract(tiny_target, data, tmp_path / "run", "--layer-ids", "2", "9"),
        "aux layer id 9 is out of range: the target has 6 layers",
        "set target.aux_layer_ids to ids from 0 to 6 (default [2, 4, 5])",
    )
    assert not (tmp_path / "run").exists()


def test_ranks_that_do_not_divide_the_heads(tiny_target: Path, data: Path, tmp_path: Path) -> None:
    refused(
        extract(tiny_target, data, tmp_path / "run", "--engine", "vllm", "--tp-size", "3"),
        "4 attention heads and 2 key/value heads do not divide among 3 tensor-parallel ranks",
        "set vllm.tensor_parallel_size to one of [1, 2, 4]",
    )
    assert not (tmp_path / "run" / "states").exists()


def test_an_endpoint_with_another_engine(tiny_target: Path, data: Path, tmp_path: Path) -> None:
    refused(
        extract(
            tiny_target, data, tmp_path / "run", "--endpoint", "http://127.0.0.1:9/v1", "extract.engine=fake"
        ),
        "extract.endpoint is a vLLM server's, but extract.engine is 'fake'",
        "set extract.engine=vllm, or leave the endpoint out",
    )


def test_token_ids_that_the_target_does_not_have(tiny_target: Path, tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "data.jsonl", [*ROWS, {"id": "far", "input_ids": [5, 9999, 6]}])
    refused(
        extract(tiny_target, data, tmp_path / "run"),
        "sample far has token id 9999, the target only 300",
        "the ids are another tokenizer's: prepare the data again for this target",
    )


def test_samples_longer_than_the_limit(tiny_target: Path, data: Path, tmp_path: Path) -> None:
    write_jsonl(data, [{"input_ids": list(range(5, 55))}, *ROWS])
    whole = extract(tiny_target, data, tmp_path / "one", "--engine", "vllm", "--tp-size", "3")
    assert whole.code == 2  # it got as far as its samples
    folder = tmp_path / "one" / "prepared"
    refused(
        extract(tiny_target, folder, tmp_path / "two", "--max-seq-len", "32"),
        "sample line-00000001 has 50 tokens, more than data.max_length (32)",
        "set data.max_length=50 (--max-seq-len)",
    )


def test_samples_of_another_tokenizer(tiny_target: Path, data: Path, tmp_path: Path) -> None:
    extract(tiny_target, data, tmp_path / "one", "--engine", "vllm", "--tp-size", "3")
    folder = tmp_path / "one" / "prepared"
    manifest = unseal(read_json(folder / "manifest.json"))
    write_json(folder / "manifest.json", seal(manifest | {"tokenizer_fingerprint": "other"}))
    refused(
        extract(tiny_target, folder, tmp_path / "two"),
        f"{tmp_path / 'two' / 'prepared'} was made with another tokenizer than the target's",
        "prepare the data again for this target",
    )


def test_an_output_that_cannot_be_written(tiny_target: Path, data: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.touch()  # permissions do not stop root, a file in the way does
    refused(
        extract(tiny_target, data, blocked / "run"),
        f"cannot write to {blocked / 'run'}: Not a directory",
        "set run_dir (--output-dir) to a folder on a disk that can be written",
    )


@pytest.mark.parametrize(
    ("line", "what", "hint"),
    [
        ("not json", "line 1 is not JSON", None),
        ('{"ids": [1]}', "line 1 has no input_ids", 'each line is {"input_ids": [...], "loss_mask": [...]}'),
        ('{"input_ids": [5, 6], "loss_mask": [1]}', "line 1: (2,) token ids but (1,) loss_mask", None),
        ('{"input_ids": [5, "a"]}', "line 1: invalid literal for int()", None),
    ],
)
def test_lines_that_hold_no_tokens(
    tiny_target: Path, tmp_path: Path, line: str, what: str, hint: str | None
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(line + "\n" + json.dumps(ROWS[0]) + "\n")
    screen = extract(tiny_target, data, tmp_path / "run")
    assert screen.code == 2
    assert f"error: {data} {what}" in screen.err
    assert hint is None or f"hint: {hint}" in screen.err
    assert not (tmp_path / "run" / "prepared").exists()


def test_a_target_whose_states_vllm_would_give_wrongly_is_not_started(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_target(tmp_path / "tiny")
    monkeypatch.setattr("eyas.engines.vllm.engine.installed_version", lambda: (0, 23))
    screen = extract(target, data, tmp_path / "run", "--engine", "vllm", "vllm.capture=native")
    assert screen.code == 2
    assert "error: vLLM 0.23 has no dependable extract_hidden_states" in screen.err
