"""Which recipe gives the draft that is accepted most, for the same answers, tokens and steps?

    python benchmarks/acceptance.py --answers answers.jsonl.gz --output runs.jsonl          # everything
    python benchmarks/acceptance.py ... --only-answers --time-limit 300                     # or in two parts:
    python benchmarks/acceptance.py ... --recipes specforge ours --seeds 0 1 2  # answers exist
    python benchmarks/acceptance.py ... --summary                                           # the table again

The target answers training and evaluation prompts greedily, once. With ``--sampled-answers`` it answers the
evaluation prompts at temperature 1 as well: drafts propose their likeliest token, and to accept that with the
target's probability for it is what replaying a sampled answer does. Then worker processes share the list of
runs: each keeps the target's states in its device's memory, trains a draft, replays decoding on held-out
answers and on the evaluation suites' (exact for greedy answers, see ``acceptance.replay``), and
decodes some evaluation prompts for real. A JSON line a run is written as it ends, so a limit loses little.
Recipes are in acceptance_recipes.py; choose between them by held-out answers, never by the suites.
"""

import argparse
import dataclasses
import json
import math
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from acceptance_answers import HELD_OUT, make_answers, make_sampled, note, read_answers, stored_answers
from acceptance_recipes import RECIPES, Recipe
from acceptance_table import DEPTHS, SUITES, read_runs, summarize
from batched_decode import decode
from eyas import registry
from eyas.config.schema import TargetSettings, TrainSettings
from eyas.data.pack import pack
from eyas.data.vocab import build_vocab_map, count_supervised
from eyas.drafters.common.acceptance import Acceptance, replay_answers
from eyas.drafters.common.batch import PackedBatch, lay_out
from eyas.drafters.common.teacher_targets import teacher_targets
from eyas.drafters.eagle3.config import draft_config_for
from eyas.drafters.eagle3.model import Eagle3Draft
from eyas.drafters.eagle3.objective import FusedObjective
from eyas.drafters.eagle3.settings import Settings
from eyas.drafters.eagle3.ttt_rows import rows_of
from eyas.drafters.eagle3.unroll import UnrollResult, run_unroll
from eyas.engines.hidden_state_hooks import HiddenStateHooks
from eyas.engines.transformers.engine import TransformersEngine, batches_by_length
from eyas.files import fingerprint
from eyas.targets.resolve_model import locate
from eyas.targets.spec import read_target
from eyas.targets.teacher import TeacherHead, read_last_layer, read_teacher
from eyas.train.loop import Trainer
from eyas.train.prefetch import feed
from eyas.types import HiddenStates, TargetSpec, TokenizedSample, VocabMap

DECODE_BATCH = 150  # prompts decoded together: their caches only grow, and other runs share the device


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", default="demo:smollm2-135m-instruct")
    parser.add_argument("--answers", type=Path, required=True, help="made if it does not exist")
    parser.add_argument("--sampled-answers", type=Path, help="made if it does not exist")
    parser.add_argument(
        "--output", type=Path, help="a JSON line a run, appended; runs in it are not repeated"
    )
    parser.add_argument("--only-answers", action="store_true")
    parser.add_argument("--summary", action="store_true")
    parser.add_argument("--time-limit", type=float, default=math.inf, help="seconds for the whole command")
    made = parser.add_argument_group("answers")
    made.add_argument("--prompts", type=Path, default=Path("../shared/data/train-pool.jsonl.gz"))
    made.add_argument("--eval-prompts", type=Path, default=Path("../shared/data/eval-prompts.jsonl"))
    made.add_argument("--num-prompts", type=int, default=12000)
    made.add_argument("--num-held-out", type=int, default=400)
    made.add_argument("--num-eval", type=int, default=200, help="prompts of a suite at most")
    made.add_argument("--max-prompt-tokens", type=int, default=256)
    made.add_argument("--max-new-tokens", type=int, default=256)
    made.add_argument("--generate-batch", type=int, default=2048)
    made.add_argument("--engine", default="transformers", choices=["transformers", "vllm"])
    made.add_argument("--engine-arg", action="append", default=[], help="name=value for vLLM")
    runs = parser.add_argument_group("runs")
    runs.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=list(RECIPES), metavar="NAME")
    runs.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    runs.add_argument("--num-epochs", type=int, default=1)
    runs.add_argument("--batch-tokens", type=int, default=4096)
    runs.add_argument("--num-train", type=int, help="training answers used; default all")
    runs.add_argument("--workers", type=int, default=1, help="runs at a time, each a process with all states")
    runs.add_argument(
        "--decode-prompts", type=int, default=32, help="of each suite decoded for real; 0: none"
    )
    runs.add_argument("--decode-depths", type=int, nargs="+", default=[3])
    return parser.parse_args()


# States, in the device's memory


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def new_engine(folder: Path, spec: TargetSpec) -> TransformersEngine:
    batch_tokens = 65536 if device().type == "cuda" else 4096
    return TransformersEngine(folder, spec, batch_tokens=batch_tokens, batch_size=1024, device=device().type)


@torch.no_grad()
def tapped(
    engine: TransformersEngine, samples: Sequence[TokenizedSample]
) -> Iterator[tuple[TokenizedSample, torch.Tensor, torch.Tensor]]:
    """Yield samples, those of like length together, with views of all their states on the device.

    Shapes: aux [T, A, D], last [T, D].
    """
    for batch in batches_by_length(samples, engine.batch_tokens, engine.batch_size):
        ids = torch.zeros(len(batch), max(len(s) for s in batch), dtype=torch.long)
        for row, sample in enumerate(batch):
            ids[row, : len(sample)] = torch.from_numpy(sample.input_ids)
        with HiddenStateHooks(engine.model, (*engine.spec.aux_layer_ids, engine.spec.num_layers)) as taps:
            engine.model.get_decoder()(input_ids=ids.to(engine.device), use_cache=False)
        aux, last = taps.aux_and_last()
        for row, sample in enumerate(batch):
            yield sample, aux[row, : len(sample)], last[row, : len(sample)]


def capture(engine: TransformersEngine, samples: Sequence[TokenizedSample]) -> list[HiddenStates]:
    """Do what the engine's own capture does, and leave the states on the device."""
    found = {
        sample.sample_id: HiddenStates.select(sample, aux.clone(), last)
        for sample, aux, last in tapped(engine, samples)
    }
    return [found[s.sample_id] for s in samples]


class Reader:
    """A StateReader over some aux layers of states in memory."""

    def __init__(
        self, states: Sequence[HiddenStates], spec: TargetSpec, aux_layer_ids: Sequence[int]
    ) -> None:
        self.states = states
        columns = [spec.aux_layer_ids.index(i) for i in aux_layer_ids]
        self.columns = torch.tensor(columns, device=device())
        self.spec = dataclasses.replace(spec, aux_layer_ids=tuple(aux_layer_ids))
        self.fingerprint = fingerprint([s.sample.sample_id for s in states])

    @property
    def lengths(self) -> Sequence[int]:
        return [len(s.sample) for s in self.states]

    def read(self, index: int) -> HiddenStates:
        states = self.states[index]
        return HiddenStates(states.sample, states.aux.index_select(1, self.columns), states.last)

    def sample(self, index: int) -> TokenizedSample:
        return self.states[index].sample


# One run


class Run(Trainer):
    """A training run that leaves nothing on disk and keeps its curve with the clock."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.curve: list[dict[str, float]] = []
        self.started = time.monotonic()
        self.measuring_s = 0.0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started - self.measuring_s

    def _validate(self, step: int) -> None:
        synchronize()
        seconds, begun = self.seconds, time.monotonic()
        lengths = measure(self, self.held_out_states)
        self.curve.append({"step": step, "seconds": round(seconds, 2), **lengths})
        self.measuring_s += time.monotonic() - begun

    def _save(self, step: int) -> Path:
        return self.root


def length_of(states: Sequence[HiddenStates]) -> int:
    return sum(len(s.sample) for s in states)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@torch.no_grad()
def measure(run: Trainer, states: Any) -> dict[str, float]:
    """Replay decoding of every answer and return the acceptance length at each depth."""
    totals = {k: Acceptance.empty(k) for k in DEPTHS}
    load = partial(load_batch, states, max(DEPTHS), run.dtype, run.device.type == "cuda")
    for batch in feed(load, [pack(states.lengths, run.settings.batch_tokens, seed=0)], run.device):
        result = unroll(run, batch)
        rows, accepted, depth = (x.cpu() for x in (batch.plan.rows[0], result.accepted, result.depth))
        for k in DEPTHS:
            for answer in replay_answers(rows, accepted, depth, k):
                totals[k] += answer
    return {f"al{k}": round(total.length, 4) for k, total in totals.items()}


def load_batch(
    states: Any, num_steps: int, dtype: torch.dtype, pinned: bool, indices: list[int]
) -> PackedBatch:
    return lay_out([states.read(i) for i in indices], rows_of(num_steps), dtype, pinned)


def unroll(run: Trainer, batch: PackedBatch) -> UnrollResult:
    if not isinstance(run.objective, FusedObjective):
        return run_unroll(run.draft, run.teacher, run.target_ids, batch, 1.0)
    targets = teacher_targets(run.teacher, batch.last, run.target_ids, run.vocab.is_full, False)
    return run.objective.unroll.run(batch, targets, run.target_ids, 1.0, "kl", with_gradients=False)


def new_draft(
    recipe: Recipe, states: Reader, vocab: VocabMap, teacher: TeacherHead, folder: Path, seed: int
) -> Eagle3Draft:
    spec, shape = states.spec, Settings(**recipe.draft)
    draft = Eagle3Draft(
        draft_config_for(
            spec,
            len(vocab),
            shape.intermediate_size,
            fc_norm=shape.fc_norm,
            norm_output=shape.norm_output,
        )
    )
    last_layer = read_last_layer(folder, spec) if recipe.start == "eyas" else {}
    rows = teacher.head[torch.from_numpy(vocab.target_ids)]
    draft.initialise(teacher.embedding, rows, teacher.norm_weight, last_layer, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        if recipe.start != "eyas":
            draft.fc.weight.normal_(0, 0.02, generator=generator)
        if recipe.start == "nothing":
            draft.lm_head.weight.normal_(0, 0.02, generator=generator)
            draft.norm.weight.fill_(1)
    return draft


class Lab:
    """The target's states on one device, and the runs made from them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.folder = args, locate(args.target)
        default = read_target(self.folder, TargetSettings(model=args.target)).aux_layer_ids
        self.ids = {name: RECIPES[name].aux_layer_ids or default for name in args.recipes}
        settings = TargetSettings(
            model=args.target, aux_layer_ids=sorted({i for s in self.ids.values() for i in s})
        )
        self.spec = read_target(self.folder, settings)
        self.teacher = read_teacher(self.folder, self.spec).to("cpu", torch.float32)
        self.engine = new_engine(self.folder, self.spec)
        samples = read_answers(args.answers)
        samples["train"] = samples["train"][: args.num_train]
        if any(RECIPES[name].stored for name in args.recipes):
            samples["stored"] = stored_answers(args, samples["train"])
        self.counts = count_supervised(samples["train"], self.spec.vocab_size)
        begun = time.monotonic()
        self.states = {split: capture(self.engine, of_split) for split, of_split in samples.items()}
        synchronize()
        self.sampled: dict[str, list[HiddenStates]] = {}
        if args.sampled_answers:
            sampled = read_answers(args.sampled_answers)
            self.sampled = {suite: capture(self.engine, of_suite) for suite, of_suite in sampled.items()}
        num_tokens = sum(len(s) for of_split in samples.values() for s in of_split)
        seconds = time.monotonic() - begun
        note(f"captured {num_tokens:,} tokens in {seconds:.1f} s")

    def run(self, name: str, seed: int) -> dict[str, Any]:
        args, recipe, ids = self.args, RECIPES[name], self.ids[name]
        train = self.states["stored" if recipe.stored else "train"]
        train = train[: round(recipe.data_share * len(train))]
        readers = {split: Reader(s, self.spec, ids) for split, s in (self.states | {"train": train}).items()}
        size = Settings(**recipe.draft).vocab_size
        vocab = build_vocab_map(self.counts, size, self.spec.eos_token_ids)
        settings = {
            "num_epochs": round(args.num_epochs * length_of(self.states["train"]) / length_of(train)),
            "batch_tokens": args.batch_tokens,
        }
        with tempfile.TemporaryDirectory() as root:
            run = Run(
                drafter=registry.drafter("eagle3"),
                draft_settings=Settings(**recipe.draft),
                draft=new_draft(recipe, readers["train"], vocab, self.teacher, self.folder, seed),
                teacher=self.teacher,
                vocab=vocab,
                train_states=readers["train"],
                held_out_states=readers[HELD_OUT],
                settings=TrainSettings(
                    **(settings | recipe.train),
                    validate_draft_tokens=max(DEPTHS),
                    validate_every=10**9,
                    save_every=10**9,
                ),
                seed=seed,
                root=Path(root),
                device=device(),
            )
            eighth = max(1, len(run.batches) // 8)
            run.settings = run.settings.model_copy(update={"validate_every": eighth})
            run.run()
            with run.averaged():
                return self._evaluate(run, readers, name, seed, ids)

    def _evaluate(
        self, run: "Run", readers: dict[str, Reader], name: str, seed: int, ids: Sequence[int]
    ) -> dict[str, Any]:
        begun = time.monotonic()
        result = {
            "recipe": name,
            "seed": seed,
            "tokens": sum(readers["train"].lengths) * run.settings.num_epochs,
            "steps": len(run.batches),
            "seconds": run.curve[-1]["seconds"],
            "held_out": {k: run.curve[-1][k] for k in (f"al{d}" for d in DEPTHS)},
            "suites": {suite: measure(run, readers[suite]) for suite in SUITES if suite in readers},
            "sampled": {
                suite: measure(run, Reader(states, self.spec, ids)) for suite, states in self.sampled.items()
            },
            "decoded": self._decode(run, ids) if self.args.decode_prompts else {},
            # The stored answers to the prompts that were decoded: what decoding has to be compared with.
            "decoded_replay": {
                suite: measure(run, Reader(self.states[suite][: self.args.decode_prompts], self.spec, ids))
                for suite in SUITES
                if suite in self.states and self.args.decode_prompts
            },
            "curve": run.curve,
            "loss": round(statistics.mean(r["loss"] for r in run.history[-20:] if "loss" in r), 4),
            "skipped": sum(1 for r in run.history if r.get("taken") is False),
        }
        return result | {"evaluation_s": round(time.monotonic() - begun, 1)}

    def _decode(self, run: Run, ids: Sequence[int]) -> dict[str, dict[str, float]]:
        """Decode the suites' first prompts together and return what was accepted, suite by suite."""
        samples = [
            s.sample
            for suite in SUITES
            if suite in self.states
            for s in self.states[suite][: self.args.decode_prompts]
        ]
        prompts = [s.input_ids[: int(s.loss_mask.argmax())].tolist() for s in samples]
        self.engine.spec = dataclasses.replace(self.spec, aux_layer_ids=tuple(ids))
        out: dict[str, dict[str, float]] = defaultdict(dict)
        for depth in self.args.decode_depths:
            answers = [
                answer
                for start in range(0, len(prompts), DECODE_BATCH)
                for answer in decode(
                    self.engine,
                    run.draft,
                    run.target_ids,
                    prompts[start : start + DECODE_BATCH],
                    depth,
                    self.args.max_new_tokens,
                )
            ]
            totals: dict[str, Acceptance] = defaultdict(partial(Acceptance.empty, depth))
            for sample, answer in zip(samples, answers, strict=True):
                totals[sample.sample_id.partition("/")[0]] += answer.acceptance
            for suite, total in totals.items():
                out[suite][f"al{depth}"] = round(total.length, 4)
        self.engine.spec = self.spec
        return dict(out)


def work(args: argparse.Namespace, started: float, runs: Any, lock: Any) -> None:
    """Make runs off the shared list until it is empty or the time is up."""
    lab = Lab(args)
    longest = 0.0
    while time.time() - started + longest < args.time_limit:
        with lock:
            if not runs:
                return
            name, seed = runs.pop(0)
        begun = time.time()
        try:
            result = lab.run(name, seed)
        except (RuntimeError, ValueError) as error:  # out of memory, say: a result too
            result = {"recipe": name, "seed": seed, "error": str(error)}
        longest = max(longest, time.time() - begun)
        result["wall_s"] = round(time.time() - begun, 1)
        with lock, args.output.open("a") as file:
            file.write(json.dumps(result) + "\n")
        note(json.dumps({k: v for k, v in result.items() if k != "curve"}))
    note("the time limit ends this worker")


def main() -> None:
    args, started = parse(), time.time()
    if args.summary:
        summarize(args.output)
        return
    if not args.answers.is_file():
        make_answers(args, device().type, time.monotonic())
    if args.sampled_answers and not args.sampled_answers.is_file():
        target = locate(args.target)
        spec = read_target(target, TargetSettings(model=args.target))
        make_sampled(args, new_engine(target, spec))
    if args.only_answers:
        return
    assert args.output is not None, "--output says where the runs go"
    done = {(r["recipe"], r["seed"]) for r in read_runs(args.output)}
    todo = [(name, seed) for seed in args.seeds for name in args.recipes if (name, seed) not in done]
    context = torch.multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        shared, lock = manager.list(todo), manager.Lock()
        workers = [
            context.Process(target=work, args=(args, started, shared, lock)) for _ in range(args.workers)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    summarize(args.output)


if __name__ == "__main__":
    main()
