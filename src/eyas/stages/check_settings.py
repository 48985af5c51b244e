"""Settings that a late stage would refuse are refused before an early one works for hours."""

from collections.abc import Callable

from eyas import registry
from eyas.capture.fleet import check_fleet
from eyas.capture.stream import check_stream
from eyas.config.schema import EvaluateSettings, RunConfig
from eyas.drafters.serving import check_layers, vllm_file
from eyas.errors import UserError
from eyas.stages.init_from import read_start
from eyas.stages.run_context import RunContext
from eyas.stages.train import draft_config
from eyas.train.sharded_params import check_sharding


def check_settings(context: RunContext) -> None:
    """Raises: UserError where one of ``CHECKS`` refuses, or the draft cannot be built, started or served."""
    for check in CHECKS:
        check(context.config)
    _check_draft(context)


def check_names(config: RunConfig) -> None:
    """Raises: UserError for a name that nothing is registered under."""
    for table, name, kind in (
        (registry.ENGINES, config.regenerate.engine, "engine"),
        (registry.ENGINES, config.extract.engine, "engine"),
        (registry.EXPORTERS, config.export.format, "export format"),
        *((registry.TRACKERS, name, "tracker") for name in config.train.trackers),
    ):
        registry.check(table, name, kind)


def _check_draft(context: RunContext) -> None:
    config = context.config
    kind = config.draft.architecture
    if config.evaluate.engine == "vllm":
        vllm_file(kind)
    check_layers(kind, context.draft_spec.aux_layer_ids)
    stored = read_start(context)
    shape = draft_config(context, config.draft.vocab_size or context.spec.vocab_size)
    if config.export.format == "speculators":
        registry.drafter_file(kind, "export").check_speculators(stored.shape if stored else shape)


def _check_evaluation(settings: EvaluateSettings) -> None:
    if settings.engine == "transformers" and not settings.endpoint:
        if not settings.in_process:
            raise UserError(
                "evaluate.in_process is false and no engine is named", hint="set evaluate.engine=vllm"
            )
        served_only = ("benchmarks", "sweep_draft_tokens")
        if unread := [name for name in served_only if getattr(settings, name)]:
            raise UserError(
                f"evaluate.{unread[0]} is measured in an engine that serves, and none is named",
                hint="set evaluate.engine=vllm, or evaluate.endpoint=URL",
            )
    elif settings.engine == "vllm":
        from eyas.engines.vllm.versions import installed_version

        installed_version()


# Each looks at the settings alone.
CHECKS: tuple[Callable[[RunConfig], None], ...] = (
    check_names,
    check_stream,
    check_fleet,
    lambda config: check_sharding(config.train),
    lambda config: _check_evaluation(config.evaluate),
)
