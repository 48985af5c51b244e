import gzip
from pathlib import Path

import pytest

from eyas.data.sources import Drop, in_held_out, read_sources
from eyas.errors import UserError
from eyas.types import Conversation, Message
from tiny import write_jsonl


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
