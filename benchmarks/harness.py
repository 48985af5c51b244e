"""One draft by any recipe from the states of one run, measured as all others are: a JSON line each.

    eyas run -c run.yaml            # or prepare, regenerate and extract: the answers and their states
    python benchmarks/harness.py run run.yaml --recipe eyas --tokens 5e6 --seeds 0 1 2 --output lines.jsonl
    python benchmarks/harness.py run run.yaml --recipe eyas --minutes 2 -- draft.ttt_steps=5
    python benchmarks/harness.py run run.yaml --recipe speculators --minutes 2 -- --lr 3e-4
    python benchmarks/harness.py run run.yaml --recipe specforge --minutes 2 -- training.learning_rate=1e-3
    python benchmarks/harness.py table lines.jsonl

What follows ``--`` goes to the recipe unchanged: settings of eyas, options of ``speculators train``,
overrides of ``specforge train``. Both peers need a GPU, and packages in the environment of eyas:

    pip install --no-deps speculators==0.9.0 hs-connectors==0.9.0 specforge==0.2.0 yunchang==0.6.4
    pip install accelerate datasets loguru openai openai-harmony pydantic-settings tensorboard

``--tokens`` gives each recipe as many tokens (epochs of the first answers); ``--minutes`` as many minutes,
the start of its process and compilation included, after two short trainings that measure its speed. A recipe
trains in a process of its own and never sees a held-out answer; its last weights are measured.
"""

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from eyas.config.load import load_config
from eyas.stages.run_context import RunContext
from harness_answers import Answers, Budget, Chosen, choose
from harness_measure import conditions, measure
from harness_recipes import RECIPES
from harness_table import read_lines, table

# Shares of a store that the speed of a recipe is measured with.
_SHORT, _LONG = 1 / 32, 1 / 8


def main() -> None:
    options, flags = parse()
    if options.verb == "table":
        print(table(read_lines(options.lines), options.num_draft_tokens))
        return
    answers = Answers(options.run, RunContext(load_config(options.run)))
    options.work.mkdir(parents=True, exist_ok=True)
    budget = budget_of(options, answers, flags)
    for seed in options.seeds:
        folder = Path(tempfile.mkdtemp(prefix=f"{options.recipe}-", dir=options.work))
        line = {
            "recipe": options.recipe,
            "flags": flags,
            "seed": seed,
            **trained(options.recipe, answers, budget, folder, seed, flags),
            **measure(answers, folder / "draft", options.num_draft_tokens),
            **conditions(),
        }
        text = json.dumps(line)
        print(text, flush=True)
        if options.output:
            with options.output.open("a") as file:
                file.write(text + "\n")


def trained(
    recipe: str, answers: Answers, budget: Budget, folder: Path, seed: int, flags: list[str]
) -> dict[str, Any]:
    """Train a draft into ``folder/draft`` in a process of its own; return what was spent."""
    chosen = choose(answers, budget)
    data = prepared(recipe, answers, chosen, folder.parent)
    process = multiprocessing.get_context("spawn").Process(
        target=RECIPES[recipe].train, args=(answers.run_file, chosen, data, folder, seed, flags)
    )
    started = time.monotonic()
    process.start()
    process.join()
    seconds = time.monotonic() - started
    if process.exitcode:
        sys.exit(f"{recipe}: training ended with exit code {process.exitcode}; its output is above")
    return {
        "answers": len(chosen.indices),
        "epochs": chosen.num_epochs,
        "tokens": chosen.num_tokens * chosen.num_epochs,
        "seconds": round(seconds, 1),
        **json.loads((folder / "facts.json").read_text()),
    }


def prepared(recipe: str, answers: Answers, chosen: Chosen, work: Path) -> Path:
    """Return the folder of what a trainer reads of these answers; all its runs share it."""
    folder = work / f"{recipe}-data-{len(chosen.indices)}"
    if not folder.exists():
        beside = Path(tempfile.mkdtemp(dir=work))
        RECIPES[recipe].prepare(answers, chosen, beside)
        beside.rename(folder)
    return folder


def budget_of(options: argparse.Namespace, answers: Answers, flags: list[str]) -> Budget:
    """Return the tokens to train on: those asked for, or those that ``--minutes`` allow."""
    if options.minutes is None:
        return Budget(int(options.tokens or sum(answers.lengths)))
    spent = []
    for share in (_SHORT, _LONG):
        part = Budget(int(share * sum(answers.lengths)))
        folder = Path(tempfile.mkdtemp(prefix="speed-", dir=options.work))
        spent.append(trained(options.recipe, answers, part, folder, 0, flags))
    (tokens, seconds), (more_tokens, more_seconds) = ((s["tokens"], s["seconds"]) for s in spent)
    token_s = max(more_seconds - seconds, 1e-3) / (more_tokens - tokens)
    start_s = max(0.0, seconds - tokens * token_s)
    print(f"speed: {start_s:.1f} s to start, {1 / token_s:,.0f} tokens/s", file=sys.stderr, flush=True)
    num_tokens = (60 * options.minutes - start_s) / token_s
    if num_tokens < tokens:
        sys.exit(
            f"{options.minutes} minutes are too few for {options.recipe}, which starts in {start_s:.0f} s"
        )
    return Budget(int(num_tokens))


def parse() -> tuple[argparse.Namespace, list[str]]:
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser("run")
    run.add_argument("run", type=Path, help="run file with finished states")
    run.add_argument("--recipe", choices=list(RECIPES), required=True)
    amount = run.add_mutually_exclusive_group()
    amount.add_argument("--tokens", type=float, help="trained on in all; default: one epoch")
    amount.add_argument("--minutes", type=float, help="of the training process")
    run.add_argument("--seeds", type=int, nargs="+", default=[0])
    run.add_argument("--num-draft-tokens", type=int, nargs="+", default=[3, 7], help="K that are measured")
    run.add_argument(
        "--work", type=Path, default=Path("harness"), help="for drafts and peers' copies of the states"
    )
    run.add_argument("--output", type=Path, help="a JSON line a seed is added")
    lines = verbs.add_parser("table")
    lines.add_argument("lines", type=Path, nargs="+")
    lines.add_argument("--num-draft-tokens", type=int, nargs="+", default=[3, 7])
    return parser.parse_args(words[:end]), words[end + 1 :]


if __name__ == "__main__":
    main()
