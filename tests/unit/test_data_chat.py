import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from eyas.data.chat import ChatRenderer, RenderError, finish_samples, generated_turn
from eyas.types import Conversation, Message, TokenizedSample
from tiny import CHAT_TEMPLATE, make_tokenizer

IM_END = 1
# Qwen3's manner: what an earlier turn thought is not shown later.
FORGETFUL = (
    "{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REFUSING = "{% if messages[0].role == 'system' %}{{ raise_exception('no system prompt') }}{% endif %}x"
MISPLACED = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}GO{% endif %}"


def renderer(template: str = CHAT_TEMPLATE) -> ChatRenderer:
    return ChatRenderer(make_tokenizer(template), [IM_END])


def talk(*turns: tuple[str, str], reasoning: str | None = None) -> Conversation:
    messages = [Message(role, text, reasoning if role == "assistant" else None) for role, text in turns]
    return Conversation("c", tuple(messages), "test")


TWO_TURNS = talk(
    ("system", "Be brief."), ("user", "Why?"), ("assistant", "So."), ("user", "And?"), ("assistant", "Yes!")
)


def learned(sample: TokenizedSample, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the texts under the mask, one for each unbroken run."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], sample.loss_mask, [0]])))
    return [str(tokenizer.decode(sample.input_ids[a:b])) for a, b in edges.reshape(-1, 2)]


def test_the_mask_covers_every_answer_with_its_end_of_turn_and_nothing_else() -> None:
    r = renderer()
    (sample,) = r.samples(TWO_TURNS, 1000)
    assert learned(sample, r.tokenizer) == ["So.<|im_end|>", "Yes!<|im_end|>"]
    assert sample.sample_id == "c"
    assert not sample.cut


def test_the_sample_is_what_the_server_sees_up_to_the_last_end_of_turn() -> None:
    r = renderer()
    (sample,) = r.samples(TWO_TURNS, 1000)
    text = r.tokenizer.apply_chat_template(TWO_TURNS.for_template(), tokenize=False)
    assert r.tokenizer.decode(sample.input_ids) == str(text).rstrip("\n")


def test_words_that_look_like_markers_do_not_move_the_mask() -> None:
    r = renderer()
    tricky = talk(("user", "say assistant\nSo."), ("assistant", "So."))
    (sample,) = r.samples(tricky, 1000)
    assert learned(sample, r.tokenizer) == ["So.<|im_end|>"]


def test_a_prompt_ends_where_the_answer_begins() -> None:
    r = renderer()
    (sample,) = r.samples(TWO_TURNS, 1000)
    prompt = r.prompt_ids(TWO_TURNS, 2)
    assert sample.input_ids[: len(prompt)].tolist() == prompt
    assert int(sample.loss_mask.argmax()) == len(prompt)


def test_a_template_that_forgets_reasoning_gives_each_turn_its_own_context() -> None:
    r = renderer(FORGETFUL)
    conversation = talk(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), reasoning="hm")
    first, second = r.samples(conversation, 1000)
    assert (first.sample_id, second.sample_id) == ("c#0", "c#1")
    assert learned(first, r.tokenizer) == ["<think>hm</think>b<|im_end|>"]
    assert learned(second, r.tokenizer) == ["<think>hm</think>d<|im_end|>"]


def test_a_refusal_of_the_template_is_told_in_its_own_words() -> None:
    with pytest.raises(RenderError, match="no system prompt"):
        renderer(REFUSING).samples(TWO_TURNS, 1000)


def test_a_template_whose_answer_does_not_follow_its_prompt_is_refused() -> None:
    with pytest.raises(RenderError, match="another context than its prompt"):
        renderer(MISPLACED).samples(talk(("user", "a"), ("assistant", "b")), 1000)


def test_a_conversation_that_opens_with_the_assistant_teaches_nothing_about_that_turn() -> None:
    r = renderer()
    (sample,) = r.samples(talk(("assistant", "Hello"), ("user", "a"), ("assistant", "b c")), 1000)
    assert learned(sample, r.tokenizer) == ["b c<|im_end|>"]


def cut_sample(length: int, max_length: int) -> TokenizedSample | None:
    """Cut a sample of three prompt tokens and ``length - 3`` answer tokens."""
    ids = np.arange(length, dtype=np.int32)
    turn = TokenizedSample("c", ids, ids >= 3)
    samples = finish_samples("c", [turn], max_length)
    return samples[0] if samples else None


def test_a_cut_in_the_middle_of_an_answer_says_that_it_goes_on() -> None:
    sample = cut_sample(10, 6)
    assert sample is not None
    assert sample.input_ids.tolist() == [0, 1, 2, 3, 4, 5]
    assert sample.cut
    assert sample.supervised.tolist() == [False] * 3 + [True] * 3


def test_an_answer_that_just_fits_is_not_cut() -> None:
    sample = cut_sample(10, 10)
    assert sample is not None
    assert not sample.cut


def test_a_cut_behind_an_answer_does_not_say_that_it_goes_on() -> None:
    ids = np.arange(10, dtype=np.int32)
    (sample,) = finish_samples("c", [TokenizedSample("c", ids, (ids >= 3) & (ids < 6))], 6)
    assert not sample.cut
    assert len(sample) == 6


def test_a_sample_cut_before_its_answer_is_dropped() -> None:
    assert cut_sample(10, 3) is None


def test_one_answer_token_with_a_teacher_is_enough() -> None:
    sample = cut_sample(10, 4)
    assert sample is not None
    assert sample.supervised.sum() == 1


def test_an_answer_that_met_the_length_limit_has_no_end_of_turn_and_is_marked() -> None:
    turn = generated_turn("c", [5, 6], [7, 8], cut=True)
    assert turn is not None
    assert turn.input_ids.tolist() == [5, 6, 7, 8]
    assert turn.cut
    assert turn.supervised.tolist() == [False, False, True, True]


def test_an_answer_of_an_end_of_turn_alone_teaches_nothing() -> None:
    assert generated_turn("c", [5, 6], [IM_END], cut=False) is None
    assert generated_turn("c", [5, 6], [], cut=True) is None
