"""A server that answers the prompts, held to the target before hours of answers are asked for."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from eyas.config.schema import RegenerateSettings
from eyas.data.chat import ChatRenderer
from eyas.data.render_error import RenderError
from eyas.engines.base import Prompt
from eyas.engines.endpoint import EndpointEngine
from eyas.engines.endpoint_checks import NUM_ANSWERS, check_greedy
from eyas.errors import EyasError, UserError
from eyas.progress import say
from eyas.regeneration.dialogues import Dialogue
from eyas.regeneration.same_target import check_share, count_others
from eyas.types import Completion, Conversation, Message, TargetSpec

_COMPARED_RENDERINGS = 3
# Returns an engine that opens sessions of the target. Raises: UserError where it cannot run here.
OpenTarget = Callable[[], Any]


def open_server(
    settings: RegenerateSettings,
    spec: TargetSpec,
    renderer: ChatRenderer,
    waiting: Sequence[Dialogue],
    max_length: int,
    open_target: OpenTarget,
) -> EndpointEngine:
    """Return the server at ``settings.endpoint`` after a look at its template, its sampling and its model.

    Raises: ContractError or UserError naming what differs.
    """
    assert settings.endpoint is not None
    engine = EndpointEngine(
        settings.endpoint,
        spec,
        renderer.tokenizer,
        end_of_turn_id=renderer.end_of_turn_id(),
        concurrency=settings.concurrency,
        timeout_s=settings.timeout_s,
        extra_body=settings.extra_body,
    )
    rendered = [(d.conversation, d.slots[0]) for d in waiting[:_COMPARED_RENDERINGS]]
    rendered += [_second_turn(d, renderer) for d in waiting if len(d.slots) > 1][:1]
    compared = [_renders_alike(engine, renderer, conversation, slot) for conversation, slot in rendered]
    if not all(compared):
        say("  the server offers no rendering to compare with; prompts are sent as token ids")
    few = [d.prompt(renderer, max_length) for d in waiting[:NUM_ANSWERS]]
    prompts = [prompt for prompt in few if prompt is not None]
    answers = check_greedy(engine, prompts, settings.max_new_tokens)
    _check_model(open_target, spec, prompts, answers, settings.max_other_share)
    return engine


def _check_model(
    open_target: OpenTarget,
    spec: TargetSpec,
    prompts: Sequence[Prompt],
    answers: Sequence[Completion],
    most: float,
) -> None:
    """Compare the answers with the target in this process, where it can run."""
    try:
        target = open_target()
    except (UserError, ImportError) as error:
        why = error.what if isinstance(error, EyasError) else str(error)
        say(f"  eyas cannot tell whether the server's model is the target: {why}")
        return
    with closing(target):
        ids = {prompt.prompt_id: prompt.token_ids for prompt in prompts}
        check_share(*count_others(target.session, ids, answers, spec.dtype), most)


def _second_turn(dialogue: Dialogue, renderer: ChatRenderer) -> tuple[Conversation, int]:
    """Return a dialogue as a client sends it back after a first answer, and the message to be answered."""
    first, second = dialogue.slots[:2]
    thought = "A short thought." if renderer.reads_reasoning else None
    messages = list(dialogue.conversation.messages)
    messages[first] = Message("assistant", "An answer.", thought)
    return replace(dialogue.conversation, messages=tuple(messages)), second


def _renders_alike(
    engine: EndpointEngine, renderer: ChatRenderer, conversation: Conversation, slot: int
) -> bool:
    try:
        ours = renderer.prompt_ids(conversation, slot)
    except RenderError:
        return True  # dropped anyway
    messages = conversation.for_template()[:slot]
    tools = [dict(tool) for tool in conversation.tools]
    return engine.check_rendering(messages, tools, renderer.template_kwargs, ours)
