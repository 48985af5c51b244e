"""Settings that a late stage would refuse are refused before an early one works for hours."""

import functools
from collections.abc import Callable, Iterator, Sequence

from eyas import registry
from eyas.capture.stream import check_stream
from eyas.config.schema import RunConfig
from eyas.engines.checks import (
    check_abilities,
    check_draft_heads,
    check_draft_tokens,
    check_endpoints,
    check_evaluation,
    check_fleet,
    check_installed,
)
from eyas.engines.info import check_layers, engine_info
from eyas.errors import UserError
from eyas.plan.gpu_use import check_gpu_use
from eyas.run_folder import STAGES
from eyas.stages.check_inputs import check_inputs, check_length, check_training
from eyas.stages.init_from import draft_config, read_start
from eyas.stages.run_context import RunContext
from eyas.train.sharded_params import check_sharding


def check_settings(context: RunContext, stages: Sequence[str] = STAGES) -> None:
    """Refuse what a run could not do, whichever stage would notice; and what ``stages`` need here.

    A stage that is done needs nothing. So one stage works where only the engine of another is missing.
    Raises: UserError, the first of ``problems``.
    """
    for problem in problems(context, stages):
        raise problem


def problems(context: RunContext, stages: Sequence[str] = STAGES) -> Iterator[UserError]:
    """Yield what a late stage would refuse, one error for each check; doctor shows them all."""
    config = context.config
    states = context.states()
    to_do = [stage for stage in stages if stage in context.fresh or states[stage].state != "done"]
    checks: list[Callable[[], None]] = [functools.partial(check, config) for check in CHECKS]
    if "evaluate" in stages:
        checks.append(lambda: check_evaluation(config.evaluate))
    checks += [
        lambda: _check_draft(context, to_do),
        lambda: check_inputs(context, to_do),
        lambda: check_installed(config, to_do),
        lambda: check_length(context, to_do),
        lambda: check_training(context, to_do),
        lambda: check_endpoints(config, to_do),
        lambda: check_gpu_use(config, to_do),
    ]
    for check in checks:
        try:
            check()
        except UserError as error:
            yield error


def check_names(config: RunConfig) -> None:
    """Raises: UserError for a name that nothing is registered under."""
    for table, name, kind in (
        (registry.EXPORTERS, config.export.format, "export format"),
        *((registry.TRACKERS, name, "tracker") for name in config.train.trackers),
    ):
        registry.check(table, name, kind)


def _check_draft(context: RunContext, to_do: Sequence[str]) -> None:
    config = context.config
    kind = config.draft.architecture
    serving = engine_info(config.evaluate.engine)
    if serving.decoder is not None:
        # Which kinds the installed version serves matters where it is to serve one.
        (serving.check_kind if "evaluate" in to_do else serving.draft_file)(kind)
    check_draft_tokens(config, context.drafter.most_draft_tokens(config.draft))
    check_layers(kind, context.draft_spec.read_layers)
    stored = read_start(context)
    shape = draft_config(context, config.draft.vocab_size or context.spec.vocab_size)
    shape = stored.shape if stored else shape
    if "evaluate" in to_do:
        serving.check_draft(kind, shape, context.draft_spec.read_layers)
    if serving.decoder is not None and "evaluate" in to_do and serving.gpus_setting is not None:
        check_draft_heads(shape, serving.gpus(config), serving.gpus_setting)
    if config.export.format == "speculators":
        registry.drafter_file(kind, "export").check_speculators(shape)


# Each looks at the settings alone.
CHECKS: tuple[Callable[[RunConfig], None], ...] = (
    check_abilities,
    check_names,
    check_stream,
    check_fleet,
    lambda config: check_sharding(config.train),
)
