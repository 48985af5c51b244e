"""plan: what a run would do, what it takes and how long, each figure with its basis."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from eyas.plan import estimates
from eyas.plan.estimates import PlannedDraft, Tokens
from eyas.plan.measure_rates import MeasuredRates, Rows, calibrate, read_rows
from eyas.plan.past_runs import earlier_rates
from eyas.plan.requirements import Need, disk_needs, memory_needs
from eyas.plan.stage_times import UNITS, Rates, StagePlan, given_rates, stage_plan, with_captures, works_of
from eyas.plan.target_size import TargetSize, read_target_size
from eyas.progress import say
from eyas.progress_displays import duration, size
from eyas.run_folder import read_record
from eyas.stages.run import stages_of
from eyas.stages.run_context import RunContext
from eyas.stages.train import draft_config

# A target of at most this size is loaded for a calibration without being asked.
CALIBRATED_BYTES = 2 << 30
_CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True)
class Plan:
    shape: TargetSize
    tokens: Tokens
    bytes_per_token: int
    draft_parameters: int
    disk: list[Need]
    memory: list[Need]
    stages: list[StagePlan]
    notes: list[str] = field(default_factory=list)

    @property
    def seconds(self) -> float | None:
        """Seconds of all stages, or None where one is unknown."""
        known = [s.seconds for s in self.stages if s.seconds is not None]
        return sum(known) if len(known) == len(self.stages) else None

    def to_json(self) -> dict[str, Any]:
        needs = lambda rows: [dataclasses.asdict(n) | {"fits": n.fits} for n in rows]  # noqa: E731
        return {
            "target": {
                "model": self.shape.spec.model,
                "architecture": self.shape.spec.architecture,
                "aux_layer_ids": list(self.shape.spec.aux_layer_ids),
                "num_parameters": self.shape.num_parameters,
                "weight_bytes": self.shape.weight_bytes,
                "weight_basis": self.shape.weight_basis,
                "kv_bytes_per_token": self.shape.kv_bytes_per_token,
            },
            "tokens": dataclasses.asdict(self.tokens),
            "bytes_per_token": self.bytes_per_token,
            "draft_parameters": self.draft_parameters,
            "disk": needs(self.disk),
            "memory": needs(self.memory),
            "stages": [dataclasses.asdict(s) for s in self.stages],
            "seconds": self.seconds,
            "notes": self.notes,
        }


def plan(
    context: RunContext,
    rates: Sequence[str] = (),
    tokens: int | None = None,
    calibrate: bool | None = None,
    gpu_memory: float | None = None,
) -> Plan:
    """Estimate the run; with ``calibrate`` (by default for small targets that are here) measure rates first.

    Units: ``gpu_memory`` GiB of each GPU of the machine that is meant; None: this machine.

    Raises: UserError for a rate that cannot be read, or a target without a config.json.
    """
    given = given_rates(rates)
    shape = read_target_size(context.config.target, context.default_aux_layer_ids)
    notes = [f"the run would be refused: {shape.trouble}"] if shape.trouble else []
    states = {stage: _state(context, stage) for stage in stages_of(context)}
    earlier = earlier_rates(context)
    open_stages = {s for s in UNITS if states.get(s) not in ("done", None)}
    wanted = open_stages - given.keys() - earlier.keys()
    if calibrate is None:
        calibrate = bool(wanted) and shape.trouble is None and tokens is None and _is_small(context, shape)
    rows, measured = None, None
    counted = _counted(context)
    if tokens is None and (counted is None or calibrate):
        rows = read_rows(context.config)
    if calibrate and rows is not None:
        say("plan: measuring rates on a few rows")
        measured = _calibrate(context, rows)
    found = _tokens(context, tokens, counted, rows, measured)
    config, spec = context.config, shape.spec
    shape_of_draft = draft_config(context, config.draft.vocab_size or spec.vocab_size, spec)
    draft = PlannedDraft(context.drafter, shape_of_draft)
    works = works_of(context, found, rows, measured)
    trained = config.train.num_epochs * found.train
    if trained and works["train"] > 2 * trained:
        notes.append(
            f"validation is {1 - trained / works['train']:.0%} of training's work: "
            "raise train.validate_every, or lower data.validation_fraction"
        )
    known = Rates(given, earlier, measured)
    stages = [
        stage_plan(context, stage, states[stage], works.get(stage), known) for stage in stages_of(context)
    ]
    if config.train.source == "stream":
        rate = known.of("extract")
        captured = found.train if config.train.keep_states else trained
        in_turns = config.train.num_gpus if config.extract.fleet is None else 0
        stages = [with_captures(s, captured, rate, in_turns) if s.stage == "train" else s for s in stages]
    return Plan(
        shape=shape,
        tokens=found,
        bytes_per_token=spec.bytes_per_token,
        draft_parameters=estimates.draft_parameters(draft),
        disk=disk_needs(context, shape, found, draft, states),
        memory=memory_needs(context, shape, found, draft, gpu_memory),
        stages=stages,
        notes=notes,
    )


# Under another name: ``plan`` takes an argument of the same one.
_calibrate = calibrate


def _is_small(context: RunContext, shape: TargetSize) -> bool:
    small = shape.is_here and shape.weight_bytes <= CALIBRATED_BYTES
    return small and context.config.extract.prepared_data is None


def _state(context: RunContext, stage: str) -> str:
    record = read_record(context.folder(stage))
    return "to do" if record is None else "done" if record["done"] else "begun"


def _counted(context: RunContext) -> Tokens | None:
    """Return what is counted already: of samples that are there."""
    folders = [context.samples_folder]
    if context.config.extract.prepared_data is not None:
        folders.append(context.config.extract.prepared_data)
    for folder in folders:
        record = read_record(folder)
        counts = record.get("counts") if record and record["done"] else None
        if counts and counts.get("train_tokens"):
            train, held_out = counts["train_tokens"], counts.get("held_out_tokens", 0)
            supervised = counts["train_supervised_tokens"] + counts.get("held_out_supervised_tokens", 0)
            conversations = counts["train_conversations"] + counts.get("held_out_conversations", 0)
            share = supervised / (train + held_out)
            return Tokens(train, held_out, share, conversations, f"counted in {folder}", exact=True)
    return None


def _tokens(
    context: RunContext,
    given: int | None,
    counted: Tokens | None,
    rows: Rows | None,
    measured: MeasuredRates | None,
) -> Tokens:
    config = context.config
    if counted is not None:
        return counted
    share = config.data.validation_fraction
    if given is not None:
        return Tokens(given * (1 - share), given * share, 0.5, given / config.data.max_length,
                      "given; half of them supervised, samples of full length")  # fmt: skip
    assert rows is not None
    seen = f"{len(rows.sample):,} of {'' if rows.exact else 'about '}{rows.total:,.0f} rows"
    if measured is not None:
        conversations = rows.total * measured.kept_share
        total = conversations * measured.tokens_per_conversation
        basis = f"measured on {seen}" + (", answers on fewer" if config.regenerate.enabled else "")
        return Tokens(total * (1 - share), total * share, measured.supervised_share, conversations, basis)
    characters = sum(len(str(row)) for row in rows.sample) / max(1, len(rows.sample))
    prompt, answer = characters / _CHARACTERS_PER_TOKEN, 0.0
    if config.regenerate.enabled:
        answer = float(config.regenerate.max_new_tokens)
    length = min(prompt + answer, config.data.max_length)
    total = rows.total * length
    supervised = min(1.0, answer / length) if answer else 0.5
    basis = f"guessed from {seen}: {_CHARACTERS_PER_TOKEN} characters a token" + (
        ", answers of full length" if answer else ""
    )
    return Tokens(total * (1 - share), total * share, supervised, rows.total, basis)


def print_plan(found: Plan) -> None:
    """Print the plan for a person on stdout."""
    shape, tokens = found.shape, found.tokens
    layers = ", ".join(map(str, shape.spec.aux_layer_ids))
    print(f"target   {shape.spec.model} ({shape.spec.architecture}), {size(shape.weight_bytes)} of weights "
          f"by {shape.weight_basis}; aux layers {layers}")  # fmt: skip
    print(f"draft    {found.draft_parameters / 1e6:,.1f} million trained parameters")
    print(f"data     {tokens.total:,.0f} tokens ({tokens.supervised_share:.0%} supervised), {tokens.basis}")
    print(f"states   {found.bytes_per_token:,} bytes a supervised token")
    print()
    for need in [*found.disk, *found.memory]:
        of = "" if need.available is None else f" of {size(need.available)}"
        verdict = {True: "  fits", False: "  DOES NOT FIT", None: ""}[need.fits]
        print(f"{need.what:<46} {size(need.bytes):>10}{of}{verdict}")
        print(f"{'':<4}{need.basis}")
    print()
    for stage in found.stages:
        took = "?" if stage.seconds is None else duration(stage.seconds)
        print(f"{stage.stage:<11} {stage.state:<6} {took:>12}  {stage.work}")
        print(f"{'':<32}{stage.basis}")
    total = found.seconds
    print(f"{'in all':<11} {'':<6} {'?' if total is None else duration(total):>12}")
    for note in found.notes:
        print(f"note: {note}")
