"""Pieces of a decoded answer: whose each token is, and that they join to the answer."""

from hypothesis import given
from hypothesis import strategies as st

from eyas.evaluate.decode import Decoded
from eyas.report.examples import pieces
from tiny import make_tokenizer

TOKENIZER = make_tokenizer()


def decoded(tokens: list[int], rounds: list[tuple[tuple[int, ...], int]]) -> Decoded:
    return Decoded(tokens, 1.0, rounds=tuple(rounds))


def test_accepted_refused_and_target_tokens_are_told_apart() -> None:
    a, b, c, d, x = (TOKENIZER.encode(letter)[0] for letter in "abcdx")
    found = pieces(TOKENIZER, decoded([a, b, c, d], [((b, x, x), 1), ((x, x, x), 0)]))
    assert found == [
        ("target", "a"), ("accepted", "b"), ("rejected", "x"), ("target", "c"), ("rejected", "x"),
        ("target", "d"),
    ]  # fmt: skip


def test_a_round_that_is_wholly_accepted_refuses_nothing() -> None:
    a, b, c = (TOKENIZER.encode(letter)[0] for letter in "abc")
    found = pieces(TOKENIZER, decoded([a, b, c], [((b,), 1)]))
    assert [kind for kind, _ in found] == ["target", "accepted", "target"]


@given(st.data())
def test_pieces_that_count_join_to_the_answer_even_where_a_character_needs_several_tokens(
    data: st.DataObject,
) -> None:
    text = data.draw(st.text(alphabet="aé漢🦅 z", min_size=1, max_size=12))
    tokens = TOKENIZER.encode(text)
    rounds: list[tuple[tuple[int, ...], int]] = []
    place = 1
    while place < len(tokens):
        accepted = data.draw(st.integers(0, min(3, len(tokens) - place)))
        proposal = (*tokens[place : place + accepted], *([0] * (3 - accepted)))
        rounds.append((tuple(proposal), accepted))
        place += accepted + 1
    found = pieces(TOKENIZER, decoded(tokens, rounds))
    assert "".join(t for kind, t in found if kind != "rejected") == TOKENIZER.decode(tokens)
