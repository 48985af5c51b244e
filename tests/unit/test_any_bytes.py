"""Whatever bytes a file holds, its reader reads them or refuses in words: no other error, hang or waste."""

import contextlib
import itertools
import json
import resource
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eyas.errors import EyasError
from eyas.files import seal
from readers import GENUINE, READERS

_MOST_MIB = 300
_FEW = settings(max_examples=60, database=None, suppress_health_check=list(HealthCheck))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | st.just("../x"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("name", READERS)
def test_what_is_genuine_is_read(name: str, tmp_path: Path) -> None:
    if name not in ("checkpoint", "target index"):  # their other files are not here
        READERS[name](GENUINE[name](), tmp_path)


@pytest.mark.parametrize("name", READERS)
@_FEW
@given(data=st.data())
def test_any_bytes_are_read_or_refused(name: str, data: st.DataObject) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    content = data.draw(st.one_of(st.binary(max_size=200), _spliced(GENUINE[name]())))
    _read(name, content)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < _MOST_MIB * 1024


@pytest.mark.parametrize("name", READERS)
@_FEW
@given(data=st.data())
def test_any_values_in_the_place_of_others_are_read_or_refused(name: str, data: st.DataObject) -> None:
    """The structure stays, so that a check of the form alone does not keep the rest from being reached."""
    content = GENUINE[name]()
    if name in ("run file", "override"):
        _read(name, b"%s=%s" % (b"train.betas", json.dumps(data.draw(JSON)).encode()))
        return
    if name in ("shard", "draft weights", "target weights"):
        length = int.from_bytes(content[:8], "little")
        header = json.dumps(_changed(data, json.loads(content[8 : 8 + length]))).encode()
        _read(name, len(header).to_bytes(8, "little") + header + content[8 + length :])
        return
    lines = content.splitlines() if name in ("journal", "conversations", "token rows") else [content]
    at = data.draw(st.integers(0, len(lines) - 1))
    value = _changed(data, json.loads(lines[at]))
    if isinstance(value, dict) and "seal" in value:
        value = seal({k: v for k, v in value.items() if k != "seal"})
    lines[at] = json.dumps(value).encode()
    _read(name, b"\n".join(lines) + b"\n")


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "9" * 10_000, '{"a": 1e999}', "\ud800"])
def test_deep_large_and_odd_values_are_read_or_refused(name: str, text: str) -> None:
    _read(name, text.encode("utf-8", "surrogatepass"))
    _read(name, f'{{"format_version": {text}}}\n'.encode("utf-8", "surrogatepass"))


_LISTS = "a: &a [x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in itertools.pairwise("abcdefghi")
)
_SECTIONS = "a: &a {x: x}\n" + "".join(
    f"{b}: &{b} {{{', '.join(f'k{i}: *{a}' for i in range(9))}}}\n"
    for a, b in itertools.pairwise("abcdefghi")
)


@pytest.mark.parametrize(
    "text",
    ["target: &a {model: *a}", _LISTS, _SECTIONS, "target: {model: 2020-13-45}", "seed: 2001-02-30 25:61:61"],
)
def test_a_run_file_that_means_more_than_it_says_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(EyasError):
        READERS["run file"](text.encode(), tmp_path)


def _read(name: str, content: bytes) -> None:
    with TemporaryDirectory() as folder, contextlib.suppress(EyasError):
        READERS[name](content, Path(folder))


@st.composite
def _spliced(draw: st.DrawFn, content: bytes) -> bytes:
    """Cut something out of a genuine file and put something else in its place."""
    start = draw(st.integers(0, len(content)))
    end = draw(st.integers(start, min(len(content), start + 40)))
    return content[:start] + draw(st.binary(max_size=20)) + content[end:]


def _changed(data: st.DataObject, value: Any) -> Any:
    """Put another value somewhere into a JSON value."""
    inside = (
        list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    )
    if not inside or data.draw(st.integers(0, 5)) == 0:
        return data.draw(JSON)
    key = data.draw(st.sampled_from(inside))
    changed = value.copy()
    changed[key] = _changed(data, value[key])
    return changed
