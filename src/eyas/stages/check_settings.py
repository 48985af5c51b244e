"""Settings that a late stage would refuse are refused before an early one works for hours."""

from collections.abc import Callable, Sequence

from eyas import registry
from eyas.capture.stream import check_stream
from eyas.config.schema import RunConfig
from eyas.engines.checks import check_abilities, check_evaluation, check_fleet, check_installed
from eyas.engines.info import check_layers, engine_info
from eyas.errors import UserError
from eyas.run_folder import STAGES
from eyas.stages.init_from import draft_config, read_start
from eyas.stages.run_context import RunContext, facts_of
from eyas.train.sharded_params import check_sharding


def check_settings(context: RunContext, stages: Sequence[str] = STAGES) -> None:
    """Refuse what a run could not do, whichever stage would notice; and what ``stages`` need here.

    A stage that is done needs no engine. So one stage works where only the engine of another is missing.
    Raises: UserError where one of ``CHECKS`` refuses, or the draft cannot be built, started or served, or an
    engine is missing.
    """
    for check in CHECKS:
        check(context.config)
    if "evaluate" in stages:
        check_evaluation(context.config.evaluate)
    _check_draft(context)
    to_do = [stage for stage in stages if stage in context.fresh or not facts_of(context, stage).get("done")]
    check_installed(context.config, to_do)


def check_names(config: RunConfig) -> None:
    """Raises: UserError for a name that nothing is registered under."""
    for table, name, kind in (
        (registry.EXPORTERS, config.export.format, "export format"),
        *((registry.TRACKERS, name, "tracker") for name in config.train.trackers),
    ):
        registry.check(table, name, kind)


def _check_draft(context: RunContext) -> None:
    config = context.config
    kind = config.draft.architecture
    serving = engine_info(config.evaluate.engine)
    if serving.decoder is not None:
        serving.check_kind(kind)
    check_draft_tokens(config, context.drafter.most_draft_tokens(config.draft))
    check_layers(kind, context.draft_spec.read_layers)
    stored = read_start(context)
    shape = draft_config(context, config.draft.vocab_size or context.spec.vocab_size)
    if config.export.format == "speculators":
        registry.drafter_file(kind, "export").check_speculators(stored.shape if stored else shape)


def check_draft_tokens(config: RunConfig, most: int | None) -> None:
    """Raises: UserError for more draft tokens than one round of the draft gives."""
    asked = {
        "evaluate.num_draft_tokens": (config.evaluate.num_draft_tokens,),
        "evaluate.sweep_draft_tokens": config.evaluate.sweep_draft_tokens,
        "train.validate_draft_tokens": (config.train.validate_draft_tokens,),
    }
    for key, numbers in asked.items():
        if most is not None and max(numbers, default=0) > most:
            raise UserError(
                f"{key} asks for {max(numbers)} draft tokens, a {config.draft.architecture} draft with these "
                f"settings makes {most} a round",
                hint=f"ask for {most} at most",
            )


# Each looks at the settings alone.
CHECKS: tuple[Callable[[RunConfig], None], ...] = (
    check_abilities,
    check_names,
    check_stream,
    check_fleet,
    lambda config: check_sharding(config.train),
)
