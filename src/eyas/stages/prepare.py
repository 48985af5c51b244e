"""prepare: conversations become tokenized samples, split into train and held-out."""

from typing import Any

from eyas.data.block_samples import check_prompts, samples_of, warnings_of
from eyas.data.chat import ChatRenderer
from eyas.data.enough import check_enough
from eyas.data.prepare_summary import summary_lines, unused_lines
from eyas.data.prepared import PreparedWriter, is_whole
from eyas.data.read_records import read_blocks
from eyas.data.sources import Drop, source_fingerprint
from eyas.data.split_writer import SplitWriter
from eyas.data.tally import Tally
from eyas.errors import EyasError
from eyas.files import remove_folder
from eyas.progress import Progress, say
from eyas.stages.run_context import RunContext, begin, finish, next_command


def prepare(context: RunContext) -> None:
    """Read the sources, drop what cannot be trained on (with reasons), tokenize the rest."""
    config, folder = context.config, context.folder("prepare")
    if not begin(context, "prepare", _inputs(context), lambda: is_whole(folder)):
        return
    folder = context.folder("prepare")
    failed_drops = config.run_dir / "prepared-drops.jsonl"
    failed_drops.unlink(missing_ok=True)
    tally = Tally()
    try:
        with PreparedWriter(folder, context.spec.vocab_size) as writer:
            _write_all(context, writer, tally)
            check_enough(writer, tally, config.data, failed_drops)
            manifest = writer.finish(
                tokenizer_fingerprint=context.spec.tokenizer_fingerprint,
                template_fingerprint=context.spec.template_fingerprint,
                template_kwargs=config.data.template_kwargs,
                **tally.facts(),
            )
    except EyasError:
        # A data set that was refused leaves its list of drops, and nothing that looks like data.
        (folder / "drops.jsonl").replace(failed_drops)
        remove_folder(folder)
        for line in unused_lines(tally.facts()):
            say(line)
        raise
    finish(context, "prepare", manifest["fingerprint"], counts=manifest["counts"], drops=manifest["drops"])
    for line in summary_lines(manifest):
        say(line)
    next_command(context, "prepare")


def new_renderer(context: RunContext) -> ChatRenderer:
    """Return the renderer for the run's target and template settings."""
    spec, data = context.spec, context.config.data
    return ChatRenderer(context.tokenizer, spec.eos_token_ids, data.template_kwargs, spec.vocab_size)


def _inputs(context: RunContext) -> dict[str, Any]:
    config, spec = context.config, context.spec
    return {
        "data": {k: v for k, v in context.loaded.recorded["data"].items() if k != "max_drop_share"},
        "sources": [source_fingerprint(path) for path, _ in config.data.weighted_sources],
        "seed": config.seed,
        "regenerate": {"enabled": config.regenerate.enabled},
        "tokenizer": spec.tokenizer_fingerprint,
        "template": spec.template_fingerprint,
    }


def _write_all(context: RunContext, writer: PreparedWriter, tally: Tally) -> None:
    config, data = context.config, context.config.data
    renderer = new_renderer(context)
    split_writer = SplitWriter(writer, data.validation_fraction, str(config.seed))
    with Progress("prepare", None, "rows") as progress:
        for block in read_blocks(data, config.seed, writer, tally):
            if config.regenerate.enabled:
                results = check_prompts(renderer, block, data.max_length)
            else:
                results = samples_of(renderer, block, data.max_length, writer.counts)
            for record, result in zip(block, results, strict=True):
                if isinstance(result, str):
                    writer.drop(Drop(record.conversation_id, record.source, result))
                    continue
                tally.warnings.update(warnings_of(record, result, renderer))
                split_writer.add(record, result)
            progress.advance(len(block))
        split_writer.settle()
