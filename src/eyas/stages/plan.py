"""plan: what a run would do, what it takes and how long, each figure with its basis."""

import dataclasses
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eyas.errors import UserError, did_you_mean
from eyas.progress import say
from eyas.screens import duration
from eyas.stages import estimates
from eyas.stages.calibrate import VALIDATION_COST, Measured, Rows, calibrate, read_rows
from eyas.stages.context import RunContext
from eyas.stages.earlier import earlier_rates
from eyas.stages.estimates import Tokens
from eyas.stages.records import FOLDERS, read_record
from eyas.stages.run import stages_of
from eyas.stages.shape import Shape, read_shape
from eyas.stages.train import draft_config

# A target of at most this size is loaded for a calibration without being asked.
CALIBRATED_BYTES = 2 << 30
_CHARACTERS_PER_TOKEN = 4
_UNITS = {"prepare": "rows", "regenerate": "answered tokens", "extract": "tokens", "train": "tokens",
          "evaluate": "prompts"}  # fmt: skip


@dataclass(frozen=True)
class StagePlan:
    """``seconds`` is None where nothing tells it; ``basis`` says where it comes from."""

    stage: str
    state: str
    work: str
    seconds: float | None
    basis: str


@dataclass(frozen=True)
class Need:
    """Something that a run needs, beside what there is (None: unknown)."""

    what: str
    bytes: int
    available: int | None
    basis: str

    @property
    def fits(self) -> bool | None:
        return None if self.available is None else self.bytes <= self.available


@dataclass(frozen=True)
class Plan:
    shape: Shape
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
    given = _given(rates)
    shape = read_shape(context.config.target)
    notes = [f"the run would be refused: {shape.trouble}"] if shape.trouble else []
    states = {stage: _state(context, stage) for stage in stages_of(context)}
    earlier = earlier_rates(context)
    open_stages = {s for s in _UNITS if states.get(s) not in ("done", None)}
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
    draft = draft_config(context, config.draft.vocab_size or spec.vocab_size, spec)
    works = _works(context, found, rows, measured)
    trained = config.train.num_epochs * found.train
    if trained and works["train"] > 2 * trained:
        notes.append(
            f"validation is {1 - trained / works['train']:.0%} of training's work: "
            "raise train.validate_every, or lower data.held_out_share"
        )
    stages = [
        _stage_plan(context, stage, states[stage], works.get(stage), given, earlier, measured)
        for stage in stages_of(context)
    ]
    if config.train.source == "stream":
        rate = _rate("extract", given, earlier, measured)
        captured = found.train if config.train.keep_states else trained
        stages = [
            _with_captures(s, captured, rate, config.extract.fleet is None) if s.stage == "train" else s
            for s in stages
        ]
    return Plan(
        shape=shape,
        tokens=found,
        bytes_per_token=spec.bytes_per_token,
        draft_parameters=estimates.draft_parameters(draft),
        disk=_disk(context, shape, found, draft, states),
        memory=_memory(context, shape, found, draft, gpu_memory),
        stages=stages,
        notes=notes,
    )


# Under another name: ``plan`` takes an argument of the same one.
_calibrate = calibrate


def _given(rates: Sequence[str]) -> dict[str, float]:
    given: dict[str, float] = {}
    for text in rates:
        stage, _, number = text.partition("=")
        if stage not in _UNITS:
            raise UserError(
                f"--rate {text}: no stage {stage!r} has a rate{did_you_mean(stage, _UNITS)}",
                hint=f"known: {', '.join(_UNITS)}; as in --rate extract=2280",
            )
        try:
            given[stage] = float(number)
        except ValueError:
            given[stage] = 0.0
        if not given[stage] > 0:
            raise UserError(f"--rate {text}: {number!r} is no rate", hint="as in --rate extract=2280")
    return given


def _is_small(context: RunContext, shape: Shape) -> bool:
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
    measured: Measured | None,
) -> Tokens:
    config = context.config
    if counted is not None:
        return counted
    share = config.data.held_out_share
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


def _works(
    context: RunContext, tokens: Tokens, rows: Rows | None, measured: Measured | None
) -> dict[str, float]:
    """Return each stage's amount of work in the unit of its rate."""
    train = context.config.train
    epochs = train.num_epochs
    steps = epochs * tokens.train / (train.batch_tokens * train.micro_batches)
    validations = max(1.0, steps / train.validate_every)
    return {
        "prepare": rows.total if rows else tokens.conversations,
        "regenerate": tokens.total * tokens.supervised_share,
        "extract": tokens.held_out if train.source == "stream" else tokens.total,
        "train": epochs * tokens.train + validations * VALIDATION_COST * tokens.held_out,
        "evaluate": context.config.evaluate.num_prompts,
    }


def _stage_plan(
    context: RunContext,
    stage: str,
    state: str,
    work: float | None,
    given: dict[str, float],
    earlier: dict[str, tuple[float, str]],
    measured: Measured | None,
) -> StagePlan:
    unit = _UNITS.get(stage, "")
    text = f"{work:,.0f} {unit}" if work is not None else ""
    if state == "done":
        took = (read_record(context.folder(stage)) or {}).get("seconds")
        return StagePlan(stage, state, text, 0.0, f"took {duration(took)}" if took else "is there")
    fixed = measured.fixed_s.get(stage, 0.0) if measured else 0.0
    if work is None:
        if measured:
            return StagePlan(stage, state, text, fixed, "measured by a calibration")
        return StagePlan(stage, state, text, 60.0, "assumed: a minute")
    left = work * (1 - _share_done(context, stage))
    known = _rate(stage, given, earlier, measured)
    if known is None:
        return StagePlan(
            stage, state, text, None, f"unknown: give --rate {stage}=N ({unit}/s), or --calibrate"
        )
    rate, basis = known
    if basis.startswith("calibrated"):
        return StagePlan(stage, state, text, left / rate + fixed, f"{basis}, and {fixed:.0f} s besides")
    return StagePlan(stage, state, text, left / rate, basis)


def _rate(
    stage: str,
    given: dict[str, float],
    earlier: dict[str, tuple[float, str]],
    measured: Measured | None,
) -> tuple[float, str] | None:
    """Return the best known rate of a stage, and its basis."""
    unit = _UNITS[stage]
    if stage in given:
        return given[stage], f"given: {given[stage]:,.0f} {unit}/s"
    if stage in earlier:
        rate, where = earlier[stage]
        return rate, f"{rate:,.4g} {unit}/s in {where}"
    if measured and stage in measured.rates:
        return measured.rates[stage], f"calibrated: {measured.rates[stage]:,.4g} {unit}/s"
    return None


def _with_captures(
    train: StagePlan, num_tokens: float, rate: tuple[float, str] | None, in_turns: bool
) -> StagePlan:
    """Return the plan of training in turns with an engine, or beside a fleet of them."""
    if train.state == "done":
        return train
    work = f"{train.work}, {num_tokens:,.0f} tokens captured"
    if train.seconds is None or rate is None:
        basis = (
            train.basis
            if train.seconds is None
            else "unknown: give --rate extract=N (tokens/s), or --calibrate"
        )
        return dataclasses.replace(train, work=work, seconds=None, basis=basis)
    captures = num_tokens / rate[0]
    basis = f"{train.basis}; captures {'in turns with it' if in_turns else 'beside it'}, {rate[1]}"
    seconds = train.seconds + captures if in_turns else max(train.seconds, captures)
    return dataclasses.replace(train, work=work, seconds=seconds, basis=basis)


def _share_done(context: RunContext, stage: str) -> float:
    """Return how much of an interrupted stage is kept, where its journal tells."""
    folder = context.folder(stage)
    if stage == "extract":
        from eyas.store.journal import read_journal
        from eyas.store.manifest import StoreManifest

        done = total = 0
        for manifest in folder.glob("*/manifest.json"):
            done += len(read_journal(manifest.parent, strict=False))
            total += StoreManifest.read(manifest.parent).num_shards
        return done / total if total else 0.0
    if stage == "train":
        from eyas.train.checkpoint import latest_checkpoint, read_checkpoint

        latest = latest_checkpoint(folder)
        if latest is not None:
            checkpoint = read_checkpoint(latest)
            return checkpoint.step / checkpoint.num_steps
    return 0.0


def _disk(
    context: RunContext, shape: Shape, tokens: Tokens, draft: Any, states: dict[str, str]
) -> list[Need]:
    folder = context.config.run_dir
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    train = context.config.train
    is_stored = train.source == "store" or train.keep_states
    stored = tokens if is_stored else dataclasses.replace(tokens, train=0.0)
    parts = {
        "extract": (estimates.state_bytes(shape, stored), "hidden states"),
        "train": (estimates.checkpoint_bytes(draft), "checkpoints: last, best, and one being written"),
        "export": (estimates.export_bytes(draft, shape), "the exported draft"),
    }
    needs = [Need(what, size, None, FOLDERS[s]) for s, (size, what) in parts.items() if states[s] != "done"]
    total = sum(n.bytes for n in needs)
    return [*needs, Need("disk in all", total, free, f"free at {folder}")]


def _memory(
    context: RunContext, shape: Shape, tokens: Tokens, draft: Any, gpu_memory: float | None
) -> list[Need]:
    config = context.config
    gpus = round(gpu_memory * 2**30) if gpu_memory else _gpu_bytes()
    ram = _ram_bytes()
    place = gpus if gpus is not None else ram
    kind = "a GPU" if gpus is not None or config.extract.engine == "vllm" else "memory"
    engine, what = estimates.engine_memory(config, shape, config.extract.engine)
    share = config.vllm.gpu_memory_utilization if config.extract.engine == "vllm" else 1.0
    has = None if place is None or (kind == "a GPU" and gpus is None) else round(place * share)
    training = estimates.training_memory(config, draft, shape, tokens.supervised_share)
    on_gpu = config.train.device != "cpu" and gpus is not None
    room, basis = gpus if on_gpu else ram, "draft, optimizer, the target's embedding and head, one batch"
    if config.train.shard and config.train.num_gpus > 1:
        basis += f"; optimizer and fp32 weights in slices over {config.train.num_gpus} GPUs"
    turns = []
    if config.train.source == "stream":
        turns = [Need("train, memory", config.train.stream_bytes, ram, "states on their way, at most")]
    if turns and config.extract.fleet is None:
        basis += "; the engine beside them"
        if config.extract.engine != "vllm":
            training += engine
        elif room is not None:
            room = round(room * (1 - share))
    return [
        Need(f"extract, {kind}", engine, has, what),
        Need("train, a GPU" if on_gpu else "train, memory", training, room, basis),
        *turns,
    ]


def _gpu_bytes() -> int | None:
    import torch

    return int(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else None


def _ram_bytes() -> int | None:
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    values = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return int(values["MemAvailable"].split()[0]) * 1024


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


def size(num_bytes: float) -> str:
    """Return bytes as a person says them: 57.3 KB, 1.2 GB, 33 TB (powers of ten, as disks are sold)."""
    for unit in ("B", "KB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.3g} TB"
