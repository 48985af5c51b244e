"""The demo twice, answered and captured by transformers and by vLLM: what comes out must be the same.

    python benchmarks/engines.py --num-prompts 48 --max-new-tokens 32

Prints one JSON object: how many answers are identical token by token, the largest difference of a layer's
states, and both acceptance lengths.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from eyas.data.prepared import SPLITS, read_samples
from eyas.store.shards import ShardStore

RECIPE = Path("recipes/smollm2-cpu.yaml")
PROMPTS = Path("recipes/demo-prompts.jsonl")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-prompts", type=int, default=48)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--output", type=Path, default=Path(tempfile.gettempdir()) / "eyas-engines")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    prompts = options.output / "prompts.jsonl"
    prompts.write_text("".join(PROMPTS.open().readlines()[: options.num_prompts]))
    seconds = {name: run(name, prompts, options) for name in ("transformers", "vllm")}
    print(json.dumps(compare(options.output) | {"seconds": seconds, "torch": torch.__version__}))


def run(engine: str, prompts: Path, options: argparse.Namespace) -> float:
    settings = (
        f"run_dir={options.output / engine}",
        f"data.sources=[{prompts}]",
        f"regenerate.engine={engine}",
        f"extract.engine={engine}",
        f"regenerate.max_new_tokens={options.max_new_tokens}",
        "train.validate_every=1000",
        "train.save_every=1000",
        "evaluate.num_prompts=4",
        "evaluate.max_new_tokens=32",
    )
    started = time.monotonic()
    subprocess.run([sys.executable, "-m", "eyas", "run", "-c", str(RECIPE), *settings], check=True, stdout=2)
    return round(time.monotonic() - started)


def compare(folder: Path) -> dict[str, Any]:
    one, two = folder / "transformers", folder / "vllm"
    num_answers = num_same = 0
    worst = 0.0
    for split in SPLITS:
        answers = [{s.sample_id: s for s in read_samples(r / "regenerated", split)} for r in (one, two)]
        stores = [ShardStore(r / "states" / split) for r in (one, two)]
        places = [{s.sample(i).sample_id: i for i in range(len(s.lengths))} for s in stores]
        for sample_id, sample in answers[0].items():
            num_answers += 1
            if sample.input_ids.tolist() != answers[1][sample_id].input_ids.tolist():
                continue
            num_same += 1
            a, b = (store.read(place[sample_id]) for store, place in zip(stores, places, strict=True))
            for x, y in ((a.aux, b.aux), (a.last[:, None], b.last[:, None])):
                worst = max(worst, float(((x - y).norm(dim=(0, 2)) / x.norm(dim=(0, 2))).max()))
    reports = [json.loads((r / "evaluation" / "report.json").read_text()) for r in (one, two)]
    return {
        "answers": num_answers,
        "identical_answers": num_same,
        "worst_relative_difference": worst,
        "acceptance": [r["acceptance"] for r in reports],
        "predicted": [r["predicted"] for r in reports],
    }


if __name__ == "__main__":
    main()
