"""Sources: formats, folders, compression, broken files."""

import bz2
import gzip
import io
import json
import lzma
import sys
import types
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eyas.data import sources
from eyas.data.sources import Drop, Row, entries_left_out, read_source, source_fingerprint
from eyas.errors import UserError

ROWS: list[Any] = [
    {"id": "a", "messages": [{"role": "user", "content": "grüß\u2028 中 🦅"}]},
    {"id": "b", "messages": [{"role": "user", "content": 'with ] and } and "'}]},
    {"id": "c", "messages": []},
]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
LAYOUTS = {
    "lines.jsonl": LINES,
    "lines-without-last-end.jsonl": LINES.rstrip(),
    "windows.jsonl": b"\xef\xbb\xbf" + LINES.replace(b"\n", b"\r\n"),
    "blank-between.jsonl": LINES.replace(b"\n", b"\n\n  \n"),
    "lines.json": LINES,
    "array.json": json.dumps(ROWS).encode(),
    "array-one-line-end.json": json.dumps(ROWS).encode() + b"\n",
    "pretty.json": json.dumps(ROWS, indent=2).encode(),
    "array-of-lines.json": b"[" + b",\n".join(json.dumps(row).encode() for row in ROWS) + b"]\n",
    "objects.json": b"\n".join(json.dumps(row, indent=1).encode() for row in ROWS),
    "gzip.jsonl.gz": gzip.compress(LINES),
    "zstd.jsonl.zst": pa.compress(LINES, "zstd", asbytes=True),
    "bzip2.jsonl.bz2": bz2.compress(LINES),
    "xz.jsonl.xz": lzma.compress(LINES),
    "gzip-by-another-name.jsonl": gzip.compress(json.dumps(ROWS).encode()),
}


def _values(source: str | Path) -> list[Any]:
    return [row.value if isinstance(row, Row) else row for row in read_source(str(source))]


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_every_layout_of_a_file_gives_the_same_rows(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(LAYOUTS[name])
    assert _values(tmp_path / name) == ROWS


def test_an_array_is_read_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_CHUNK", 7)
    (tmp_path / "a.json").write_text(json.dumps(ROWS, ensure_ascii=False), encoding="utf-8")
    assert _values(tmp_path / "a.json") == ROWS


def test_a_line_may_be_a_list_of_messages(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('[{"role": "user", "content": "q"}]\n[]\n')
    assert _values(tmp_path / "a.jsonl") == [[{"role": "user", "content": "q"}], []]


def test_parquet_rows_come_without_the_nulls_that_a_table_adds(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "messages": [{"role": "user", "content": "q", "tool_calls": None}], "tools": None},
        {"id": "b", "messages": [{"role": "user", "content": None, "tool_calls": [{"name": "f"}]}]},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert _values(tmp_path / "a.parquet") == [
        {"id": "a", "messages": [{"role": "user", "content": "q"}]},
        {"id": "b", "messages": [{"role": "user", "tool_calls": [{"name": "f"}]}]},
    ]


def test_folders_and_globs_are_read_in_a_fixed_order(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.json", "sub/c.jsonl.gz", "README.md"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        data = json.dumps({"from": name}).encode()
        path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    names = [{"from": n} for n in ("a.json", "b.jsonl", "sub/c.jsonl.gz")]
    assert _values(tmp_path) == names
    assert _values(tmp_path / "**" / "*.json*") == names
    assert _values(tmp_path / "*.jsonl") == names[1:2]


def test_names_that_begin_with_a_dot_are_left_out_as_a_glob_does(tmp_path: Path) -> None:
    for name in (
        "a.jsonl",
        ".ipynb_checkpoints/a.jsonl",
        "sub/.cache/a.jsonl",
        "sub/.b.jsonl",
        "sub/c.jsonl",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"from": name}) + "\n")
    names = [{"from": "a.jsonl"}, {"from": "sub/c.jsonl"}]
    assert _values(tmp_path) == _values(tmp_path / "**" / "*.jsonl") == names
    before = source_fingerprint(str(tmp_path))
    (tmp_path / ".ipynb_checkpoints" / "a.jsonl").write_text("changed")
    assert source_fingerprint(str(tmp_path)) == before
    # A user who names a hidden file or folder means it.
    assert _values(tmp_path / ".ipynb_checkpoints") == [
        Drop(*[f"{tmp_path}/.ipynb_checkpoints/a.jsonl:1"] * 2, "broken_line")
    ]
    assert _values(tmp_path / "sub" / ".b.jsonl") == [{"from": "sub/.b.jsonl"}]


def test_what_is_no_data_in_a_folder_is_named_in_the_error(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "README.md").write_text("x")
    (tmp_path / "rows.csv").write_text("x")
    with pytest.raises(UserError, match=r"holds no data files; it holds \.git/, README\.md, rows\.csv"):
        list(read_source(str(tmp_path)))
    for i in range(9):
        (tmp_path / f"x{i}.txt").write_text("x")
    with pytest.raises(UserError, match=r"x4\.txt and 4 more"):
        list(read_source(str(tmp_path)))


def test_a_link_to_a_folder_and_a_folder_that_a_glob_matches_are_named(tmp_path: Path) -> None:
    for name in ("data/a.jsonl", "data/sub/b.jsonl", "other/c.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}\n")
    (tmp_path / "data" / "link").symlink_to(tmp_path / "other")
    assert entries_left_out(str(tmp_path / "data")) == [f"{tmp_path}/data/link/"]
    glob = str(tmp_path / "data" / "*")
    assert entries_left_out(glob) == [f"{tmp_path}/data/link/", f"{tmp_path}/data/sub/"]
    assert entries_left_out(str(tmp_path / "data" / "s*" / "**")) == []
    with pytest.raises(UserError, match="it matches only"):
        list(read_source(str(tmp_path / "d*")))


def test_a_place_names_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": 1}\n\n{"id": 2\n{"id": 3}\n')
    rows = list(read_source(str(tmp_path / "a.jsonl")))
    assert [r.place if isinstance(r, Row) else r.source for r in rows] == [
        f"{tmp_path}/a.jsonl:{line}" for line in (1, 3, 4)
    ]
    assert rows[1] == Drop(f"{tmp_path}/a.jsonl:3", f"{tmp_path}/a.jsonl:3", "broken_line")


@pytest.mark.parametrize("text", ['[{"id": 1}, {"id": 2', '[{"id": 1}, nonsense]', '[{"id": 1},'])
def test_an_array_that_breaks_off_is_reported(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    good, broken = read_source(str(tmp_path / "a.json"))
    assert isinstance(good, Row)
    assert isinstance(broken, Drop)
    assert broken.reason == "broken_line"


@pytest.mark.parametrize("name", ["gzip.jsonl.gz", "bzip2.jsonl.bz2", "xz.jsonl.xz", "zstd.jsonl.zst"])
def test_a_torn_archive_is_an_error(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(LAYOUTS[name][:-9])
    with pytest.raises(UserError, match="cannot be decompressed to its end"):
        list(read_source(str(tmp_path / name)))


def test_a_missing_source_is_refused_with_what_sources_may_be(tmp_path: Path) -> None:
    for name in ("nowhere.jsonl", "none-*.jsonl"):
        with pytest.raises(UserError, match="there is no data file") as caught:
            list(read_source(str(tmp_path / name)))
        assert "globs" in str(caught.value.hint)
    with pytest.raises(UserError, match="holds no data files"):
        list(read_source(str(tmp_path)))


def test_the_fingerprint_follows_content_and_names(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_bytes(LINES)
    before = source_fingerprint(str(tmp_path))
    assert source_fingerprint(str(tmp_path)) == before
    (tmp_path / "b.jsonl").write_bytes(LINES + LINES)
    assert source_fingerprint(str(tmp_path)) != before


def test_standard_input_is_read_and_fingerprinted(monkeypatch: pytest.MonkeyPatch) -> None:
    sources._spooled_stdin.cache_clear()
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=io.BytesIO(gzip.compress(LINES))))
    assert len(source_fingerprint("-")) == 64
    assert _values("-") == ROWS
    assert next(iter(read_source("-"))).place == "stdin:1"
    sources._spooled_stdin().unlink()
    sources._spooled_stdin.cache_clear()


def test_a_hub_data_set_is_streamed_by_name_split_and_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load_dataset(*args: Any, **kwargs: Any) -> list[Any]:
        asked.append((args, kwargs))
        return ROWS

    fake = types.SimpleNamespace(
        load_dataset=load_dataset, exceptions=types.SimpleNamespace(DatasetsError=RuntimeError)
    )
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert _values("hf:owner/name:train") == ROWS
    assert _values("hf:owner/name@v1:sft:test") == ROWS
    assert asked == [
        (("owner/name", None), {"split": "train", "revision": None, "streaming": True}),
        (("owner/name", "sft"), {"split": "test", "revision": "v1", "streaming": True}),
    ]
    with pytest.raises(UserError, match="cannot read the data source"):
        _values("hf:owner/name")


def test_a_hub_data_set_without_the_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError) as caught:
        _values("hf:owner/name:train")
    assert "eyas[hub]" in str(caught.value.hint)
