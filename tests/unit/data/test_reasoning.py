"""A generated answer becomes the message that a client sends back: reasoning and content apart."""

import pytest
from transformers import PreTrainedTokenizerBase

from data_support import make_tokenizer
from eyas.data.chat import ChatRenderer
from eyas.data.reasoning import split_reasoning
from eyas.types import Conversation, Message
from tiny_kimi import TEMPLATE

QUESTION = Message("user", "question")


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return make_tokenizer()


def renderer_of(tokenizer: PreTrainedTokenizerBase, template: str, **kwargs: object) -> ChatRenderer:
    tokenizer.chat_template = template
    assert tokenizer.eos_token_id is not None
    return ChatRenderer(tokenizer, [tokenizer.eos_token_id], kwargs)


def after_an_answer(renderer: ChatRenderer, answer: str, cut: bool = False) -> tuple[Message, str]:
    """Return the message of an answer to QUESTION, and the prompt of the turn after it."""
    tokenizer = renderer.tokenizer
    prompt = renderer.prompt_ids(Conversation("c", (QUESTION,), "s"), 1)
    ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
    told = renderer.message_of(prompt, [*ids, *(() if cut else (tokenizer.eos_token_id,))], cut)
    later = Conversation("c", (QUESTION, told, Message("user", "more")), "s")
    return told, str(tokenizer.decode(renderer.prompt_ids(later, 3)))


@pytest.mark.parametrize(
    ("text", "begun", "expected"),
    [
        ("thought</think>answer", True, ("thought", "answer")),
        ("<think>thought</think>answer", False, ("thought", "answer")),
        ("\n<think>\nthought\n</think>\n\nanswer", False, ("\nthought\n", "\n\nanswer")),
        ("<think>thought</think>answer", True, ("thought", "answer")),
        ("thought without an end", True, ("thought without an end", "")),
        ("<think>thought without an end", False, ("thought without an end", "")),
        ("an answer about </think> tags", False, (None, "an answer about </think> tags")),
        ("an answer", False, (None, "an answer")),
        ("</think>answer", True, ("", "answer")),
        ("a</think>b</think>c", True, ("a", "b</think>c")),
    ],
)
def test_an_answer_is_split_as_a_servers_parser_splits_it(
    text: str, begun: bool, expected: tuple[str | None, str]
) -> None:
    assert split_reasoning(text, begun) == expected


def test_a_template_that_reads_reasoning_apart_gets_it_apart(tokenizer: PreTrainedTokenizerBase) -> None:
    renderer = renderer_of(tokenizer, TEMPLATE)
    told, later = after_an_answer(renderer, "a thought</think>the answer")
    assert (told.reasoning, told.content) == ("a thought", "the answer")
    assert later.count("<think></think>the answer") == 1
    assert "a thought" not in later, "this template leaves earlier reasoning out"


def test_reasoning_that_met_the_length_limit_has_no_content(tokenizer: PreTrainedTokenizerBase) -> None:
    told, _ = after_an_answer(renderer_of(tokenizer, TEMPLATE), "a thought that goes on", cut=True)
    assert (told.reasoning, told.content, told.cut) == ("a thought that goes on", "", True)


def test_an_answer_without_thinking_stays_whole(tokenizer: PreTrainedTokenizerBase) -> None:
    renderer = renderer_of(tokenizer, TEMPLATE, thinking=False)
    told, later = after_an_answer(renderer, "the answer")
    assert (told.reasoning, told.content) == (None, "the answer")
    assert "<think></think>the answer" in later


def test_a_template_that_knows_no_reasoning_gets_the_text_as_it_was(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
    told, later = after_an_answer(renderer_of(tokenizer, template), "<think>a thought</think>the answer")
    assert told.reasoning is None
    assert "<think>a thought</think>the answer" in later
