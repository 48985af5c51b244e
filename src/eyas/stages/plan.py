"""plan: what a run would do, what it takes and how long, each number with its basis."""

from collections.abc import Sequence
from typing import Any

from eyas.config.load import LoadedConfig
from eyas.config.schema import RunConfig
from eyas.engines.checks import shares_start
from eyas.plan import estimates
from eyas.plan.estimates import PlannedDraft
from eyas.plan.gpu_use import planned_gpus
from eyas.plan.measure_rates import MeasuredRates, calibrate, read_rows
from eyas.plan.past_runs import earlier_rates
from eyas.plan.requirements import disk_needs, memory_needs
from eyas.plan.stage_times import UNITS, Rates, StagePlan, given_rates, stage_plan, with_captures, works_of
from eyas.plan.summary import Plan
from eyas.plan.target_size import TargetSize, read_target_size
from eyas.plan.tokens import counted_tokens, expected_tokens, given_tokens
from eyas.progress import say
from eyas.stages.init_from import draft_config
from eyas.stages.run import run_stage, stages_of
from eyas.stages.run_context import RunContext, facts_of
from eyas.train.learning_rate import with_peak_rate

# A target of at most this size is loaded for a calibration without being asked.
CALIBRATED_BYTES = 2 << 30


class StagesTrial:
    """A few rows through the real stages, to measure how fast they are."""

    def __init__(self, context: RunContext) -> None:
        self.context = context
        self.stages = stages_of(context)

    def run(self, stage: str) -> None:
        run_stage(self.context, stage)

    def facts(self, stage: str) -> dict[str, Any]:
        return facts_of(self.context, stage)


def plan(
    context: RunContext,
    rates: Sequence[str] = (),
    tokens: int | None = None,
    calibrate: bool | None = None,
    gpu_memory: float | None = None,
    gpus: int | None = None,
) -> Plan:
    """Estimate the run; with ``calibrate`` (by default for small targets that are here) measure rates first.

    Units: ``gpu_memory`` GiB of each of the ``gpus`` of the machine that is meant; None: this machine.

    Raises: UserError for a rate that cannot be read, or a target without a config.json.
    """
    given = given_rates(rates)
    config = context.config
    shape = read_target_size(config.target, context.default_aux_layer_ids)
    spec = shape.spec
    notes = [f"the run would be refused: {shape.trouble}"] if shape.trouble else []
    states = _states(context)
    earlier = earlier_rates(config)
    open_stages = {s for s in UNITS if states.get(s) not in ("done", None)}
    wanted = open_stages - given.keys() - earlier.keys()
    if calibrate is None:
        calibrate = bool(wanted) and shape.trouble is None and tokens is None and _is_small(config, shape)
    elsewhere = config.extract.prepared_data
    counted = counted_tokens([context.samples_folder, *([elsewhere] if elsewhere else [])])
    rows, measured = None, None
    if tokens is None and (counted is None or calibrate):
        rows = read_rows(config)
    if calibrate and rows is not None:
        say("plan: measuring rates on a few rows")
        measured = _measure(context, rows)
    if counted is not None:
        found = counted
    elif tokens is not None:
        found = given_tokens(config, tokens)
    else:
        assert rows is not None
        found = expected_tokens(config, rows, measured)
    works = works_of(config, found, rows, measured)
    trained = config.train.num_epochs * found.train
    if trained and works["train"] > 2 * trained:
        notes.append(
            f"validation is {1 - trained / works['train']:.0%} of training's work: "
            "raise train.validate_every, or lower data.validation_fraction"
        )
    known = Rates(given, earlier, measured)
    stages = [
        stage_plan(context.folder(stage), stage, states[stage], works.get(stage), known)
        for stage in stages_of(context)
    ]
    shape_of_draft = draft_config(context, config.draft.vocab_size or spec.vocab_size, spec)
    draft = PlannedDraft(context.drafter, shape_of_draft)
    uses, shared = planned_gpus(config, shape, found, draft, gpus, gpu_memory)
    notes += [f"the run would be refused: {shared}"] if shared else []
    if shares_start(config, "extract"):
        notes.append(f"regenerate and extract share one start of {config.extract.engine} in eyas run")
    return Plan(
        shape=shape,
        tokens=found,
        bytes_per_token=spec.bytes_per_token,
        draft_parameters=estimates.draft_parameters(draft),
        learning_rate=_learning_rate(config, shape_of_draft.hidden_size),
        disk=disk_needs(config, shape, found, draft, states),
        memory=memory_needs(config, shape, found, draft, gpu_memory),
        stages=_with_stream(config, stages, known, found.train, trained),
        notes=notes,
        gpus=uses,
    )


def _with_stream(
    config: RunConfig, stages: list[StagePlan], known: Rates, train_tokens: float, trained: float
) -> list[StagePlan]:
    """Add the captures of a stream to the time of training."""
    if config.train.source != "stream":
        return stages
    captured = train_tokens if config.train.keep_states else trained
    in_turns = config.train.num_gpus if config.extract.fleet is None else 0
    rate = known.of("extract")
    return [with_captures(s, captured, rate, in_turns) if s.stage == "train" else s for s in stages]


def _measure(context: RunContext, rows: Any) -> MeasuredRates:
    origins = context.loaded.origins
    return calibrate(context.config, rows, lambda few: StagesTrial(RunContext(LoadedConfig(few, origins))))


def _is_small(config: RunConfig, shape: TargetSize) -> bool:
    return shape.is_here and shape.weight_bytes <= CALIBRATED_BYTES and config.extract.prepared_data is None


def _learning_rate(config: RunConfig, width: int) -> float:
    return float(with_peak_rate(config.train, width, config.draft.init_from is not None).learning_rate)


def _states(context: RunContext) -> dict[str, str]:
    """Return how far each stage of the run is, in order."""
    found = context.states()
    states: dict[str, str] = {stage: found[stage].state for stage in stages_of(context)}
    return {stage: "to do" if state == "not begun" else state for stage, state in states.items()}
