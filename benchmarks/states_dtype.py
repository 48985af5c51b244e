"""What do states in eight bits cost? The same answers and recipe with each ``extract.states_dtype``.

    python benchmarks/states_dtype.py answers.jsonl --output runs/states-dtype train.num_epochs=2

``answers.jsonl`` holds a line a sample: ``input_ids`` and ``loss_mask``, of the target's own answers (what
``--from RUN`` takes out of a run folder). Each dtype is extracted once; each seed trains on both. Prints
bytes a token, the relative error of the states (root mean square over all values of a layer) and the
held-out acceptance length of the best checkpoint.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch

from eyas.config.load import load_config
from eyas.stages.run import run_stage
from eyas.stages.run_context import RunContext, facts_of

DTYPES = ("auto", "float8_e4m3fn")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("answers", type=Path, help="JSONL of samples; written first where --from is given")
    parser.add_argument("--from", dest="run", type=Path, help="run folder whose samples are taken")
    parser.add_argument("--num-samples", type=int, default=250)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--target", default="demo:smollm2-135m-instruct")
    parser.add_argument("--num-seeds", type=int, default=2)
    parser.add_argument("settings", nargs="*", help="further settings, section.key=value")
    options = parser.parse_intermixed_args()
    if options.run:
        take_samples(options.run, options.answers, options.num_samples)
    results = []
    for dtype in DTYPES:
        run(options, dtype, 0, "extract")
        for seed in range(options.num_seeds):
            started = time.monotonic()
            context = run(options, dtype, seed, "train", fresh=True)
            trained, extracted = facts_of(context, "train"), facts_of(context, "extract")
            num_tokens = sum(
                sum(r.num_tokens for r in context.store(s).records.values()) for s in ("train", "held_out")
            )
            row = {
                "states_dtype": dtype,
                "seed": seed,
                "bytes_per_token": round(extracted["num_bytes"] / num_tokens, 1),
                "num_tokens": num_tokens,
                "num_steps": trained["num_steps"],
                "acceptance_length": round(trained["acceptance_length"], 4),
                "seconds": round(time.monotonic() - started, 1),
            }
            print(json.dumps(row), flush=True)
            results.append(row)
    for layer, error in errors(options).items():
        print(f"layer {layer}: relative error {error:.4f}")
    means = {d: [r["acceptance_length"] for r in results if r["states_dtype"] == d] for d in DTYPES}
    print({d: round(sum(values) / len(values), 4) for d, values in means.items()})


def take_samples(run: Path, answers: Path, num: int) -> None:
    """Write a run's first samples as JSONL, held-out ones first: there are few of them."""
    table = pq.read_table(run / "regenerated" / "samples.parquet")
    rows = sorted(table.to_pylist(), key=lambda row: row["split"] != "held_out")[:num]
    keys = ("input_ids", "loss_mask")
    lines = [{"id": r["sample_id"], **{k: [int(v) for v in r[k]] for k in keys}} for r in rows]
    answers.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def run(options: Any, dtype: str, seed: int, stage: str, fresh: bool = False) -> RunContext:
    settings = (
        f"run_dir={options.output / dtype}",
        f"target.model={options.target}",
        "data.sources=[]",
        "regenerate.enabled=false",
        f"extract.prepared_data={options.answers}",
        f"extract.states_dtype={dtype}",
        f"seed={seed}",
        *options.settings,
    )
    context = RunContext(load_config(None, settings), frozenset([stage]) if fresh else frozenset())
    run_stage(context, stage)
    return context


def errors(options: Any) -> dict[str, float]:
    """Compare what the two stores hold, layer by layer."""
    stores = [run(options, dtype, 0, "extract").store("train") for dtype in DTYPES]
    ids = (*stores[0].spec.aux_layer_ids, "last")
    wrong, all_of = torch.zeros(len(ids)), torch.zeros(len(ids))
    for index in range(len(stores[0].lengths)):
        exact, eight = (store.read(index) for store in stores)
        for place in range(len(ids)):
            a, b = (s.last if place == len(ids) - 1 else s.aux[:, place] for s in (exact, eight))
            wrong[place] += (a.float() - b.float()).square().sum()
            all_of[place] += a.float().square().sum()
    return {str(i): float(e) for i, e in zip(ids, (wrong / all_of).sqrt(), strict=True)}


if __name__ == "__main__":
    main()
