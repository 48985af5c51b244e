"""speculators' own trainer on the answers of acceptance.py: a baseline that is nobody's imitation.

Run in an environment that has speculators beside eyas; each verb is a process, for the device's memory:

    python benchmarks/speculators_trainer.py data --answers answers.jsonl.gz --work DIR
    python benchmarks/speculators_trainer.py train --work DIR --name packs-4096 -- --total-seq-len 4096
    python benchmarks/speculators_trainer.py measure --work DIR --name packs-4096 \\
        --answers answers.jsonl.gz --output runs.jsonl

``data`` captures the target's states as acceptance.py does and writes them in speculators' offline form.
``train`` calls its command; what follows -- goes to it unchanged, and all else is its default but one epoch,
32,000 draft ids, all answers trained on, and its plain loss. ``measure`` reads the draft as
``draft.init_from`` does and replays the answers that acceptance.py does, whose ``--summary`` then shows it.
"""

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

from acceptance import Reader, capture, device, measure, new_engine, tapped
from acceptance_answers import HELD_OUT, note, read_answers
from acceptance_table import SUITES
from eyas.config.schema import TargetSettings, TrainSettings
from eyas.engines.transformers.engine import TransformersEngine
from eyas.export.native import load_export
from eyas.targets.resolve_model import locate
from eyas.targets.spec import read_target
from eyas.targets.teacher import read_teacher
from eyas.types import TargetSpec

NUM_VALIDATED = 16  # its validation wants some answers; what it says there changes nothing


def parse() -> tuple[argparse.Namespace, list[str]]:
    words = sys.argv[1:]
    place = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("verb", choices=["data", "train", "measure"])
    parser.add_argument("--target", default="demo:smollm2-135m-instruct")
    parser.add_argument("--answers", type=Path)
    parser.add_argument("--sampled-answers", type=Path, help="acceptance.py's, of temperature 1")
    parser.add_argument("--work", type=Path, required=True, help="16 GB for 3M tokens of SmolLM2's states")
    parser.add_argument("--name", default="draft", help="of this draft, in --work")
    parser.add_argument("--num-train", type=int, help="training answers used; default all")
    parser.add_argument("--seed", type=int, default=42, help="speculators' default")
    parser.add_argument("--output", type=Path, help="a JSON line is added")
    return parser.parse_args(words[:place]), words[place + 1 :]


def engine_of(args: argparse.Namespace) -> tuple[Path, TargetSpec, TransformersEngine]:
    folder = locate(args.target)
    spec = read_target(folder, TargetSettings(model=args.target))
    return folder, spec, new_engine(folder, spec)


# What it trains on


def write_data(args: argparse.Namespace) -> None:
    """Write ids and masks as a datasets folder, a file of states a sample, and its own count of tokens."""
    from datasets import Dataset
    from speculators.train.vocab_mapping import save_token_frequency_distribution

    folder, spec, engine = engine_of(args)
    answers = read_answers(args.answers)
    train = answers["train"][: args.num_train]
    samples = train + answers[HELD_OUT][:NUM_VALIDATED]
    number = {s.sample_id: i for i, s in enumerate(samples)}
    states_folder = args.work / "data" / "hidden_states"
    states_folder.mkdir(parents=True)
    with ThreadPoolExecutor(8) as pool:
        written = []
        for sample, aux, last in tapped(engine, samples):
            own = {  # the last layer behind the others
                "hidden_states": torch.cat([aux, last[:, None]], dim=1).cpu(),
                "token_ids": torch.from_numpy(sample.input_ids).long(),
            }
            path = states_folder / f"hs_{number[sample.sample_id]}.safetensors"
            written.append(pool.submit(save_file, own, path))
        for one in written:
            one.result()
    dataset = Dataset.from_dict(
        {
            "input_ids": [s.input_ids.tolist() for s in samples],
            "loss_mask": [s.loss_mask.astype(int).tolist() for s in samples],
            "seq_len": [len(s) for s in samples],
        }
    )
    dataset.set_format(type="torch")
    dataset.save_to_disk(str(args.work / "data"))
    save_token_frequency_distribution(dataset.select(range(len(train))), args.work / "data" / "token_freq.pt")
    facts = {
        "target": str(folder),
        "aux_layer_ids": spec.aux_layer_ids,
        "num_train": len(train),
        "tokens": sum(len(s) for s in train),
    }
    (args.work / "data.json").write_text(json.dumps(facts))
    note(json.dumps(facts))


# Its training


def train(args: argparse.Namespace, flags: list[str]) -> None:
    facts = json.loads((args.work / "data.json").read_text())
    share = (facts["num_train"] + 0.5) / (facts["num_train"] + NUM_VALIDATED)
    out = args.work / args.name
    command = [
        sys.executable, "-m", "speculators", "train",
        "--verifier-name-or-path", facts["target"], "--data-path", args.work / "data", "--save-path", out,
        "--target-layer-ids", *facts["aux_layer_ids"], "--train-data-ratio", share, "--epochs", 1,
        "--draft-vocab-size", 32000, "--on-missing", "raise", "--seed", args.seed, "--num-workers", 4,
        "--loss-implementation", "eager", *flags,
    ]  # fmt: skip
    begun = time.monotonic()
    subprocess.run([str(word) for word in command], check=True)
    seconds = round(time.monotonic() - begun, 1)  # its start and compilation are in it
    steps = json.loads((out / "0" / "training_state.json").read_text())["global_step"]
    result = {**facts, "seed": args.seed, "flags": flags, "seconds": seconds, "steps": steps}
    (out / "train.json").write_text(json.dumps(result))
    note(json.dumps(result))


# What it is worth


def measure_draft(args: argparse.Namespace) -> dict[str, Any]:
    """Replay the answers in fp32, on the path that computes all of speculators' norms."""
    facts = json.loads((args.work / args.name / "train.json").read_text())
    folder, spec, engine = engine_of(args)
    teacher = read_teacher(folder, spec).to("cpu", torch.float32)
    draft, target_ids, config = load_export(args.work / args.name / "0", teacher.embedding)
    assert config["eagle_aux_hidden_state_layer_ids"] == facts["aux_layer_ids"] == list(spec.aux_layer_ids)
    run: Any = SimpleNamespace(
        draft=draft.to(device()),
        teacher=teacher.to(device(), torch.float32),
        target_ids=target_ids.to(device()),
        settings=TrainSettings(batch_tokens=4096),
        dtype=torch.float32,
        device=device(),
        fused=None,
    )

    def lengths(answers: Path, splits: tuple[str, ...]) -> dict[str, dict[str, float]]:
        samples = read_answers(answers)
        states = {split: capture(engine, samples[split]) for split in splits if samples.get(split)}
        return {split: measure(run, Reader(of, spec, spec.aux_layer_ids)) for split, of in states.items()}

    found = lengths(args.answers, (HELD_OUT, *SUITES))
    held_out = found.pop(HELD_OUT)
    return {
        "recipe": " ".join(["speculators' trainer", *facts["flags"]]),
        "seed": facts["seed"],
        "tokens": facts["tokens"],
        "steps": facts["steps"],
        "seconds": facts["seconds"],
        "held_out": held_out,
        "suites": found,
        "sampled": lengths(args.sampled_answers, SUITES) if args.sampled_answers else {},
        "decoded": {},
        "curve": [{"step": facts["steps"], "seconds": facts["seconds"], **held_out}],
    }


def main() -> None:
    args, flags = parse()
    if args.verb == "data":
        write_data(args)
    elif args.verb == "train":
        train(args, flags)
    else:
        line = json.dumps(measure_draft(args))
        note(line)
        if args.output:
            with args.output.open("a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
