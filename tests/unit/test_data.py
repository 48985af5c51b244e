"""Sources, vocabulary, packing, and the prepared folder."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from eyas.data.pack import pack
from eyas.data.prepared import PreparedWriter, read_conversations, read_manifest, read_samples
from eyas.data.sources import Drop, in_held_out, read_sources
from eyas.data.vocab import build_vocab_map, count_supervised, coverage
from eyas.errors import ContractError, UserError
from eyas.types import Conversation, Message, TokenizedSample
from tiny import random_samples, write_jsonl


def test_messages_and_prompts_both_become_conversations(tmp_path: Path) -> None:
    path = write_jsonl(
        tmp_path / "a.jsonl",
        [{"id": 7, "messages": [{"role": "user", "content": "hi"}]}, {"prompt": "ho"}],
    )
    first, second = read_sources([str(path)])
    assert isinstance(first, Conversation)
    assert isinstance(second, Conversation)
    assert (first.conversation_id, first.messages) == ("7", (Message("user", "hi"),))
    assert second.messages == (Message("user", "ho"),)


def test_a_row_without_an_id_keeps_its_id_when_the_file_is_reordered(tmp_path: Path) -> None:
    rows = [{"prompt": text} for text in ("a", "b", "c")]
    there = [r.conversation_id for r in read_sources([str(write_jsonl(tmp_path / "1.jsonl", rows))])]
    back = [r.conversation_id for r in read_sources([str(write_jsonl(tmp_path / "2.jsonl", rows[::-1]))])]
    assert back == there[::-1]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"prompt": "x"', "broken line"),
        ("[1, 2]", "not an object"),
        ('{"text": "x"}', "no messages"),
        ('{"messages": []}', "no messages"),
        ('{"messages": [{"content": "x"}]}', "a message has no role"),
        ('{"messages": [{"role": "user", "content": null}]}', "a message's content is not text"),
        ('{"messages": [{"role": "usr", "content": "x"}]}', "unknown role 'usr'"),
    ],
)
def test_a_row_that_is_no_conversation_is_dropped_with_a_reason(
    tmp_path: Path, line: str, reason: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(line + '\n\n{"prompt": "good"}\n')
    dropped, good = read_sources([str(path)])
    assert isinstance(dropped, Drop)
    assert dropped.reason == reason
    assert isinstance(good, Conversation)


def test_gzip_and_a_byte_order_mark_change_nothing(tmp_path: Path) -> None:
    data = '\ufeff{"prompt": "grüß"}\n'.encode()
    (tmp_path / "a.jsonl").write_bytes(data)
    with gzip.open(tmp_path / "b.jsonl.gz", "wb") as f:
        f.write(data)
    (plain,) = read_sources([str(tmp_path / "a.jsonl")])
    (packed,) = read_sources([str(tmp_path / "b.jsonl.gz")])
    assert plain.messages == packed.messages == (Message("user", "grüß"),)


def test_a_missing_source_is_refused() -> None:
    with pytest.raises(UserError, match=r"no data file nowhere\.jsonl"):
        list(read_sources(["nowhere.jsonl"]))


def test_the_split_depends_on_the_id_and_the_seed_alone() -> None:
    ids = [f"id-{i}" for i in range(4000)]
    held = [i for i in ids if in_held_out(i, 0.1, seed=0)]
    assert 300 < len(held) < 500
    assert [i for i in ids if in_held_out(i, 0.1, seed=0)] == held
    assert [i for i in ids if in_held_out(i, 0.1, seed=1)] != held
    assert set(held) <= {i for i in ids if in_held_out(i, 0.2, seed=0)}


def test_counts_are_of_what_the_assistant_wrote() -> None:
    sample = TokenizedSample("s", np.array([4, 4, 2, 2, 3], np.int32), np.array([0, 0, 1, 1, 1], bool))
    assert count_supervised([sample], 6).tolist() == [0, 0, 2, 1, 0, 0]


def test_the_draft_vocabulary_takes_end_of_turn_first_then_the_most_used() -> None:
    vocab = build_vocab_map(np.array([0, 5, 9, 5, 1, 0]), 3, always=[0])
    assert vocab.target_ids.tolist() == [0, 1, 2]
    assert build_vocab_map(np.array([0, 5, 9, 5, 1, 0]), 3, always=[]).target_ids.tolist() == [1, 2, 3]


def test_a_vocabulary_as_large_as_the_targets_is_the_targets() -> None:
    for size in (None, 6, 100):
        assert build_vocab_map(np.zeros(6, np.int64), size, [1]).is_full


def test_coverage_is_the_share_of_tokens_that_the_draft_can_say() -> None:
    counts = np.array([1, 6, 3])
    assert coverage(counts, build_vocab_map(counts, 1, [])) == 0.6
    assert coverage(counts, build_vocab_map(counts, 3, [])) == 1.0


@pytest.mark.parametrize("seed", range(5))
def test_packing_places_every_document_once_within_the_budget(seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, 60, 300).tolist()
    groups = pack(lengths, 100, seed)
    assert sorted(i for g in groups for i in g) == list(range(300))
    assert max(sum(lengths[i] for i in g) for g in groups) <= 100
    # The waste of a budget is small, or packing has no point.
    assert len(groups) <= 1.1 * sum(lengths) / 100 + 1


def test_a_document_longer_than_the_budget_is_alone() -> None:
    groups = pack([500, 10, 10], 100, 0)
    assert [0] in groups


def test_packing_is_the_same_for_the_same_seed_and_another_for_another() -> None:
    lengths = np.random.default_rng(0).integers(1, 60, 100).tolist()
    assert pack(lengths, 100, 3) == pack(lengths, 100, 3)
    assert pack(lengths, 100, 3) != pack(lengths, 100, 4)
    assert pack([], 100, 0) == []


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
