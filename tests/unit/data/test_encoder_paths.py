"""Turns encoded together have the ids and spans that a server's own tokenization of each prompt gives."""

from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

from eyas.data.encode import Encoder, Turn
from eyas.types import TokenizedSample
from tiny import IM_END, IM_START, make_tokenizer

TOKENIZER = make_tokenizer()
EOS = frozenset({TOKENIZER.eos_token_id})
Span = tuple[tuple[int, ...], tuple[int, ...]]  # the ids before an answer, and the answer's


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def as_served(turn: Turn) -> Span:
    """Return what a server is given, and the answer up to and with its end, if it has one."""
    prompt, full = ids_of(turn.prompt), ids_of(turn.full)
    if full[: len(prompt)] != prompt:
        full = prompt + ids_of(turn.full[len(turn.prompt) :])
    answer = full[len(prompt) :]
    ends = [place for place, token in enumerate(answer) if token in EOS]
    if ends:
        answer = answer[: ends[0] + (not turn.cut)]
    return tuple(prompt), tuple(answer)


def spans_of(samples: Sequence[TokenizedSample]) -> list[Span]:
    found = []
    for sample in samples:
        mask = [False, *sample.loss_mask.tolist(), False]
        starts = [i for i in range(len(mask) - 1) if mask[i + 1] and not mask[i]]
        stops = [i for i in range(len(mask) - 1) if mask[i] and not mask[i + 1]]
        ids = tuple(sample.input_ids.tolist())
        found += [(ids[:a], ids[a:b]) for a, b in zip(starts, stops, strict=True)]
    return found


def chat(
    *turns: tuple[str, str], end: str = IM_END, last: str | None = None, cut: bool = False
) -> list[Turn]:
    """Render question and answer pairs; ``end`` follows each answer, ``last`` the last one."""
    text, made = "", []
    for number, (question, answer) in enumerate(turns):
        prompt = f"{text}{IM_START}user\n{question}{IM_END}\n{IM_START}assistant\n"
        is_last = number == len(turns) - 1
        full = f"{prompt}{answer}{last if is_last and last is not None else end}"
        made.append(Turn(prompt, full, cut and is_last))
        text = full + "\n"
    return made


TWO = (("the quick", "brown fox"), ("and then?", "the lazy dog"))
CASES: dict[str, list[Turn]] = {
    "one turn": chat(TWO[0]),
    "two turns": chat(*TWO),
    "three turns": chat(*TWO, ("why", "because")),
    "an answer that is cut": chat(*TWO, last="", cut=True),
    "a cut answer before an end": chat(*TWO, cut=True),
    "only the last answer has an end": chat(*TWO, end="", last=IM_END),
    "no answer has an end": chat(*TWO, end=""),
    "text behind the end": chat(*TWO, end=f"{IM_END} bye"),
    "two ends": chat(*TWO, end=IM_END + IM_END),
}


@pytest.mark.parametrize("name", CASES)
def test_each_answer_follows_the_prompt_that_a_server_is_given(name: str) -> None:
    (samples,) = Encoder(TOKENIZER, EOS).turns([CASES[name]])
    assert spans_of(samples) == [as_served(turn) for turn in CASES[name]]
    assert samples[-1].cut == CASES[name][-1].cut


def test_the_users_end_of_turn_is_no_end_of_an_answer_that_has_none() -> None:
    """Only the later answer has an end: the user's must not be taken, or the user's text is trained on."""
    (samples,) = Encoder(TOKENIZER, EOS).turns([chat(*TWO, end="", last=IM_END)])
    user = ids_of("and then?")
    for _, answer in spans_of(samples):
        assert not any(list(answer[i : i + len(user)]) == user for i in range(len(answer)))


def test_an_end_that_the_next_turn_brings_is_not_the_answers() -> None:
    """The template puts an end of turn between messages, not behind them."""
    first = Turn(f"{IM_START}q\n", f"{IM_START}q\nthe fox", cut=False)
    prompt = f"{first.full}{IM_END}{IM_START}r\n"
    second = Turn(prompt, f"{prompt}the dog{IM_END}", cut=False)
    (samples,) = Encoder(TOKENIZER, EOS).turns([[first, second]])
    assert spans_of(samples) == [as_served(first), as_served(second)]
    assert spans_of(samples)[0][1] == tuple(ids_of("the fox"))


@pytest.mark.parametrize(
    ("prompt", "answer"), [("say: t", "he fox"), ("say: the", "re"), ("a quick b", "rown fox")]
)
@pytest.mark.parametrize("start", ["", IM_START])
def test_a_prompt_that_the_answer_would_merge_with_is_encoded_alone(
    prompt: str, answer: str, start: str
) -> None:
    turn = Turn(start + prompt, start + prompt + answer + IM_END, cut=False)
    merged = ids_of(prompt + answer) != ids_of(prompt) + ids_of(answer)
    (samples,) = Encoder(TOKENIZER, EOS).turns([[turn]])
    assert spans_of(samples) == [as_served(turn)]
    if merged:
        assert samples[0].input_ids.tolist() == ids_of(start + prompt) + ids_of(answer + IM_END)


def test_some_cases_do_merge() -> None:
    assert ids_of("say: the fox") != ids_of("say: t") + ids_of("he fox")


def test_conversations_encoded_together_are_those_encoded_apart() -> None:
    conversations = [*CASES.values(), []]
    together = Encoder(TOKENIZER, EOS).turns(conversations)
    encoder = Encoder(TOKENIZER, EOS)
    apart = [encoder.turns([turns])[0] for turns in conversations * 2]  # known tails change nothing
    for found, wanted in zip(together * 2, apart, strict=True):
        assert spans_of(found) == spans_of(wanted)
    assert Encoder(TOKENIZER, EOS).turns([[], []]) == [[], []]
    assert Encoder(TOKENIZER, EOS).ids([]) == []


def test_turns_that_continue_each_other_share_a_sample_and_others_do_not() -> None:
    joined, apart = chat(*TWO), [*chat(TWO[0]), *chat(TWO[1])]
    encoder = Encoder(TOKENIZER, EOS)
    assert [len(samples) for samples in encoder.turns([joined, apart])] == [1, 2]


class Slow:
    """A tokenizer without offsets, as the slow ones are."""

    is_fast = False

    def __init__(self) -> None:
        self.added_tokens_decoder = TOKENIZER.added_tokens_decoder

    def __call__(self, texts: Any, **options: Any) -> dict[str, Any]:
        assert "return_offsets_mapping" not in options
        return {"input_ids": TOKENIZER(texts, **options)["input_ids"]}


@pytest.mark.parametrize("name", CASES)
def test_a_slow_tokenizer_gives_the_same_answers(name: str) -> None:
    (samples,) = Encoder(Slow(), EOS).turns([CASES[name]])  # type: ignore[arg-type]
    assert spans_of(samples) == [as_served(turn) for turn in CASES[name]]


@pytest.mark.parametrize(
    ("special", "normalized", "shares"),
    [(True, False, True), (True, True, False), (False, False, False), (False, True, False)],
)
def test_turns_share_an_encoding_only_where_every_end_cuts_the_text(
    special: bool, normalized: bool, shares: bool
) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(
        [AddedToken("<stop>", special=special, normalized=normalized)], special_tokens=special
    )
    stop = tokenizer.convert_tokens_to_ids("<stop>")
    added = tokenizer.added_tokens_decoder[stop]
    assert (added.special, added.normalized) == (special, normalized)
    assert Encoder(tokenizer, EOS | {stop})._shares == shares
    every = frozenset(i for i, t in tokenizer.added_tokens_decoder.items() if t.special and not t.normalized)
    assert Encoder(tokenizer, every)._shares


def test_only_short_ends_of_prompts_are_remembered() -> None:
    encoder = Encoder(TOKENIZER, EOS)
    short, long = chat(("q", "a")), [Turn(IM_START + "x" * 65, IM_START + "x" * 65 + "a" + IM_END, False)]
    encoder.turns([short, long])
    assert len(encoder._tails) == 1
    assert max(map(len, encoder._tails)) <= 64


def with_bos() -> Any:
    """Return a tokenizer that puts a BOS before every text that it is not told to leave alone."""
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{IM_START} $A", special_tokens=[(IM_START, tokenizer.bos_token_id)]
    )
    assert tokenizer("fox")["input_ids"] == [tokenizer.bos_token_id, *ids_of("fox")]
    return tokenizer


@pytest.mark.parametrize("name", CASES)
def test_a_tokenizer_that_adds_a_bos_adds_none_to_what_the_template_has_rendered(name: str) -> None:
    encoder = Encoder(with_bos(), EOS)
    assert encoder.ids(["fox", "dog"]) == [ids_of("fox"), ids_of("dog")]
    (samples,) = encoder.turns([CASES[name]])
    assert spans_of(samples) == [as_served(turn) for turn in CASES[name]]
    (found,) = encoder.turns([CASES["two turns"]])
    assert len(found) == 1, "they still share one encoding"


@pytest.mark.parametrize("start", ["", "plain text "])
def test_a_prompt_without_a_special_token_is_compared_from_its_beginning(start: str) -> None:
    turns = [Turn(f"{start}q ", f"{start}q fox{IM_END}", cut=False)]
    (samples,) = Encoder(TOKENIZER, EOS).turns([turns])
    assert spans_of(samples) == [as_served(turn) for turn in turns]
