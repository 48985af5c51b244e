"""regenerate: the target answers the prompts itself, so that the draft learns what it has to predict."""

import dataclasses
from collections.abc import Sequence
from contextlib import closing
from itertools import islice
from typing import Any

from eyas.data.chat import ChatRenderer
from eyas.data.prepared import SPLITS, PreparedWriter, is_whole, read_conversations, read_manifest
from eyas.engines.base import Sampling
from eyas.errors import EyasError, UserError
from eyas.progress import say
from eyas.regeneration.answerer import Answerer
from eyas.regeneration.dialogues import Dialogue, write_dialogues
from eyas.regeneration.server import open_server
from eyas.stages.prepare import new_renderer
from eyas.stages.run_context import RunContext, begin, finish, next_command

# How the answers are fetched is no part of what they are.
_HOW = {"batch_size", "endpoint", "concurrency", "timeout_s", "max_failures", "max_other_share"}
_BLOCK_ROWS = 8192


def regenerate(context: RunContext) -> None:
    """Answer every assistant turn in order, each on the target's own history."""
    config, folder = context.config, context.folder("regenerate")
    if not config.regenerate.enabled:
        raise UserError(
            "regenerate.enabled is false", hint="set regenerate.enabled=true, or continue with: eyas extract"
        )
    if not begin(context, "regenerate", _inputs(context), lambda: is_whole(folder)):
        return
    folder = context.folder("regenerate")
    server = _Server(context, new_renderer(context))
    answerer = Answerer(
        folder / "answers.jsonl",
        server.renderer,
        Sampling(config.regenerate.max_new_tokens, config.regenerate.temperature, config.seed),
        server.start,
        config.data.max_length,
        config.regenerate.max_failures,
    )
    with closing(answerer), PreparedWriter(folder, context.spec.vocab_size) as writer:
        conversations = read_conversations(context.folder("prepare"))
        while block := [Dialogue.of(*row) for row in islice(conversations, _BLOCK_ROWS)]:
            answerer.answer(block)
            write_dialogues(writer, block, config.data.max_length)
        manifest = _finish(context, writer, answerer, server.name)
    counts = manifest["counts"]
    say(
        f"regenerate: {counts['train_supervised_tokens']:,} tokens to train on, "
        f"{counts.get('held_out_supervised_tokens', 0):,} held out"
    )
    if answerer.journal.num_other_prompts:
        num = answerer.journal.num_other_prompts
        say(f"  warning: {num:,} earlier answers were given to other prompts and "
            "were asked again: the template renders otherwise now, such as with another date")  # fmt: skip
    if answerer.num_retokenized:
        say(f"  warning: {answerer.num_retokenized:,} answers came back as text and were tokenized again; "
            "vLLM returns token ids")  # fmt: skip
    next_command(context, "regenerate")


def _inputs(context: RunContext) -> dict[str, Any]:
    config = context.config
    return {
        "prepared": context.output_of("prepare"),
        "target": context.spec.fingerprint,
        "regenerate": config.regenerate.model_dump(mode="json", exclude=_HOW),
        "max_length": config.data.max_length,
        "seed": config.seed,
    }


@dataclasses.dataclass
class _Server:
    """Who answers: an engine of this process, or an endpoint, which has a name."""

    context: RunContext
    renderer: ChatRenderer
    name: str | None = None

    def start(self, waiting: Sequence[Dialogue]) -> Any:
        context, settings = self.context, self.context.config.regenerate
        if settings.endpoint is None:
            return context.make_engine(settings.engine, batch_size=settings.batch_size)
        length = context.config.data.max_length
        engine = open_server(settings, context.spec, self.renderer, waiting, length, context.open_target)
        self.name = engine.model
        return engine


def _finish(
    context: RunContext, writer: PreparedWriter, answerer: Answerer, server: str | None
) -> dict[str, Any]:
    if not writer.counts["train_samples"]:
        raise EyasError(
            "the target's answers hold nothing to train on",
            hint=f"see {context.folder('regenerate') / 'drops.jsonl'}",
        )
    settings = context.config.regenerate
    prepared = read_manifest(context.folder("prepare"))
    manifest = writer.finish(
        tokenizer_fingerprint=context.spec.tokenizer_fingerprint,
        template_fingerprint=context.spec.template_fingerprint,
        template_kwargs=prepared["template_kwargs"],
        num_read=sum(prepared["counts"].get(f"{split}_conversations", 0) for split in SPLITS),
        sampling={**dataclasses.asdict(answerer.sampling), **settings.extra_body},
        served_by=server or settings.engine,
        finish_reasons=dict(answerer.finish_reasons),
        num_retokenized=answerer.num_retokenized,
        num_answers_to_other_prompts=answerer.journal.num_other_prompts,
    )
    finish(context, "regenerate", manifest["fingerprint"], counts=manifest["counts"], drops=manifest["drops"])
    return manifest
