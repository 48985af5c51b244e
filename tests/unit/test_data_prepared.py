import json
from pathlib import Path

import numpy as np
import pytest

from eyas.data.prepared import PreparedWriter, read_conversations, read_manifest, read_samples
from eyas.data.sources import Drop
from eyas.errors import ContractError, UserError
from eyas.types import Conversation, Message, TokenizedSample
from tiny import random_samples


def conversation(number: int) -> Conversation:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = (Message("user", "é\u2028"), Message("assistant", "b", "thinking", (call,)))
    return Conversation(f"c-{number}", messages, "src", ({"type": "function"},))


def write_prepared(folder: Path, samples: list[TokenizedSample]) -> dict[str, object]:
    folder.mkdir(parents=True)
    writer = PreparedWriter(folder)
    for number, sample in enumerate(samples):
        split = "held_out" if number % 4 == 0 else "train"
        writer.add_sample(split, sample)
        writer.add_conversation(split, conversation(number))
    writer.drop(Drop("x", "src", "broken line"))
    return writer.finish(tokenizer_fingerprint="t")


def test_prepared_samples_come_back_as_they_were(tmp_path: Path) -> None:
    samples = random_samples(2100, 300)  # more than one row group
    write_prepared(tmp_path / "p", samples)
    back = {s.sample_id: s for split in ("train", "held_out") for s in read_samples(tmp_path / "p", split)}
    assert len(list(read_samples(tmp_path / "p", "held_out"))) == 525
    for sample in samples:
        found = back[sample.sample_id]
        assert found.input_ids.tolist() == sample.input_ids.tolist()
        assert found.loss_mask.tolist() == sample.loss_mask.tolist()
        assert found.cut == sample.cut
        assert (found.input_ids.dtype, found.loss_mask.dtype) == (np.int32, np.bool_)


def test_prepared_conversations_come_back_as_they_were(tmp_path: Path) -> None:
    write_prepared(tmp_path / "p", random_samples(5, 300))
    rows = list(read_conversations(tmp_path / "p"))
    assert rows == [("held_out" if i % 4 == 0 else "train", conversation(i)) for i in range(5)]


def test_the_manifest_counts_what_was_written_and_dropped(tmp_path: Path) -> None:
    samples = random_samples(8, 300)
    manifest = write_prepared(tmp_path / "p", samples)
    assert read_manifest(tmp_path / "p") == manifest
    counts = manifest["counts"]
    assert isinstance(counts, dict)
    assert counts["train_samples"] + counts["held_out_samples"] == 8
    assert counts["train_tokens"] + counts["held_out_tokens"] == sum(len(s) for s in samples)
    assert manifest["drops"] == {"broken line": 1}
    (drop,) = (tmp_path / "p" / "drops.jsonl").read_text().splitlines()
    assert json.loads(drop) == {"row_id": "x", "source": "src", "reason": "broken line"}


def test_the_fingerprint_sees_every_token_mask_and_split(tmp_path: Path) -> None:
    samples = random_samples(3, 300)
    first = write_prepared(tmp_path / "a", samples)["fingerprint"]
    assert write_prepared(tmp_path / "b", samples)["fingerprint"] == first
    assert write_prepared(tmp_path / "c", samples[::-1])["fingerprint"] != first
    ids = samples[1].input_ids.copy()
    ids[-1] += 1
    changed = [samples[0], TokenizedSample("sample-1", ids, samples[1].loss_mask), samples[2]]
    assert write_prepared(tmp_path / "d", changed)["fingerprint"] != first


def test_a_folder_without_a_manifest_holds_no_prepared_data(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no prepared data"):
        read_manifest(tmp_path)


def test_a_manifest_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"format_version": 99}')
    with pytest.raises(ContractError, match="format version 99"):
        read_manifest(tmp_path)
