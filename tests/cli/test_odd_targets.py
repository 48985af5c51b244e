"""A target whose tokenizer has ids that its embedding lacks is used; a row with such an id is dropped."""

import json
from pathlib import Path

import pytest

from eyas.data.chat import ChatRenderer, RenderError
from eyas.targets.tokenizer import read_tokenizer
from eyas.types import Conversation, Message
from families import make_family
from oddities import one_id_more
from pipeline import eyas, write_jsonl, write_run
from tiny import make_target, spec_of

TOKEN = "<image_soft_token>"


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma 3 whose tokenizer has one id more than the embedding has rows, as 1B and 270M have."""
    folder = make_family(tmp_path_factory.mktemp("gemma") / "gemma3", "gemma3", 4)
    one_id_more(folder)
    return folder


@pytest.mark.parametrize("regenerate", [False, True])
def test_only_rows_with_the_id_are_dropped_and_with_their_reason(
    tmp_path: Path, gemma: Path, regenerate: bool
) -> None:
    said = [("what is this?", "a dog"), (f"look: {TOKEN}", "a fox"), ("and that?", f"{TOKEN} again")]
    rows = [
        {"id": f"r{i}", "messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for i, (q, a) in enumerate([*said, *((f"number {n}", "the lazy dog") for n in range(9))])
    ]
    sources = [str(write_jsonl(tmp_path / "rows.jsonl", rows))]
    data = {"sources": sources, "max_drop_share": 0.5, "max_length": 96}
    run_file = write_run(tmp_path, gemma, data=data, regenerate={"enabled": regenerate})
    screen = eyas("prepare", "-c", run_file)
    assert screen.code == 0, screen.err
    drops = [json.loads(line) for line in (tmp_path / "run/prepared/drops.jsonl").read_text().splitlines()]
    # Another answer takes the place of the third row's own when the target answers itself.
    expected = {"r1"} if regenerate else {"r1", "r2"}
    assert {d["row_id"]: d["reason"] for d in drops} == dict.fromkeys(expected, "token_id_out_of_range")


def test_the_run_goes_from_data_to_an_evaluated_draft(tmp_path: Path, gemma: Path) -> None:
    screen = eyas("run", "-c", write_run(tmp_path, gemma))
    assert screen.code == 0, screen.err
    served = eyas("serve", tmp_path / "run" / "draft", "--print")
    assert served.code == 0, served.err


def test_a_prompt_with_the_id_is_refused_before_an_engine_sees_it(gemma: Path) -> None:
    renderer = ChatRenderer(read_tokenizer(gemma), (1,), vocab_size=300)
    asked = Conversation("c", (Message("user", TOKEN),), "test")
    with pytest.raises(RenderError, match="token_id_out_of_range"):
        renderer.prompt_ids(asked, 1)
    (length,) = renderer.prompt_lengths([(asked, 1)])
    assert str(length) == "token_id_out_of_range"


def test_a_base_token_beyond_the_embedding_is_a_token_beyond_the_embedding(tmp_path: Path) -> None:
    assert spec_of(make_target(tmp_path / "short", vocab_size=299)).vocab_size == 299
