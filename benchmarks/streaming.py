"""A draft trained from a stream: half of the GPUs capture, half train. Who waits for whom?

    python benchmarks/streaming.py --gpus 2 --engine-arg attention_backend=TRITON_MLA
    python benchmarks/streaming.py --gpus 8 --tp 4 --layers 12 --experts 64
    python benchmarks/streaming.py --gpus 0 --target ~/.cache/eyas/targets/... --num-tokens 20000

The engines are actors of a Ray cluster that holds the second half of the GPUs; trainers have the first.
Without ``--target`` one is written: random weights in a shape of capture_tp.py, one word an id.
Prints what the training recorded as JSON, with its seconds and those of the held-out states before it.
"""

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from capture import note
from capture_tp import EXPERTS, SHAPES, write_config, write_weights
from eyas.run_folder import read_record


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory(dir=options.work) as work:
        folder = Path(work)
        target = options.target or write_target(folder / "target", options)
        run_file = write_run(folder, target, options)
        engines, trainers = halves(options.gpus)
        with cluster(engines, options.port):
            held_out_s = eyas("extract", run_file, trainers)
            train_s = eyas("train", run_file, trainers)
        record = read_record(folder / "run" / "checkpoints")
        assert record is not None
        out = {
            "gpus": options.gpus,
            "engines": max(1, len(engines) // options.tp),
            "tp_size": options.tp,
            "trainers": max(1, len(trainers)),
            "target": options.arch if options.target is None else target.name,
            "held_out_s": round(held_out_s, 1),
            "train_s": round(train_s, 1),
            **record["stream"],
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "date": time.strftime("%Y-%m-%d"),
        }
        print(json.dumps(out), flush=True)


def halves(num_gpus: int) -> tuple[list[int], list[int]]:
    """Return the GPUs that capture and those that train."""
    gpus = list(range(num_gpus))
    return gpus[num_gpus // 2 :], gpus[: num_gpus // 2]


def environment(gpus: list[int]) -> dict[str, str]:
    shown = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)), "RAY_USAGE_STATS_ENABLED": "0"}
    if (Path.home() / ".ray" / "auth_token").is_file():  # or the cluster would ask for what nobody shows
        shown["RAY_AUTH_MODE"] = "token"
    return os.environ | shown


@contextlib.contextmanager
def cluster(gpus: list[int], port: int) -> Iterator[None]:
    """A Ray cluster of this machine alone, with these GPUs."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    command += [f"--port={port}", f"--num-gpus={len(gpus)}", "--include-dashboard=false"]
    if answers(port):
        raise RuntimeError(f"somebody listens on port {port}; name another with --port")
    head = subprocess.Popen(command, env=environment(gpus), stdout=subprocess.DEVNULL)
    try:
        while not answers(port):
            if head.poll() is not None:
                raise RuntimeError(f"ray start ended with {head.returncode}")
            time.sleep(1)
        yield
    finally:
        head.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            head.wait(60)


def answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def eyas(stage: str, run_file: Path, gpus: list[int]) -> float:
    started = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "eyas", stage, "-c", str(run_file)], env=environment(gpus), check=True
    )
    note(f"{stage}: {time.monotonic() - started:.1f} s")
    return time.monotonic() - started


def write_target(folder: Path, options: argparse.Namespace) -> Path:
    """Write a target of random weights, and the tokenizer that a run asks of it."""
    changes = {"num_hidden_layers": options.layers, "vocab_size": options.vocab_size}
    if options.arch in EXPERTS:
        changes[EXPERTS[options.arch]] = options.experts
    config = write_config(folder, options, **changes)
    write_weights(folder, config, getattr(torch, options.dtype))
    words = models.WordLevel({f"w{i}": i for i in range(options.vocab_size)}, unk_token="w0")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), bos_token="w1", eos_token="w2", unk_token="w0"
    )
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} w2 {% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


def write_run(folder: Path, target: Path, options: argparse.Namespace) -> Path:
    """Write rows of random tokens, the second half of each supervised, and the run file that streams them."""
    vocab_size = json.loads((target / "config.json").read_text())["vocab_size"]
    rng = np.random.default_rng(0)
    rows = str(folder / "rows.jsonl")
    with open(rows, "w") as f:
        for _ in range(max(64, options.num_tokens // options.length)):
            ids = rng.integers(3, vocab_size, options.length).tolist()
            half = options.length // 2
            f.write(json.dumps({"input_ids": ids, "loss_mask": [0] * half + [1] * half}) + "\n")
    engines, trainers = halves(options.gpus)
    fleet = {"replicas": max(1, len(engines) // options.tp), "gpus_per_replica": options.tp if engines else 0}
    run: dict[str, Any] = {
        "run_dir": str(folder / "run"),
        "target": {"model": str(target), "dtype": options.dtype},
        "data": {"sources": [rows], "max_length": options.length, "validation_fraction": 0.05},
        "regenerate": {"enabled": False},
        "extract": {
            "engine": "vllm",
            "prepared_data": rows,
            "fleet": fleet,
            "batch_tokens": options.batch_tokens,
            "batch_size": 256,
        },
        "vllm": {"tensor_parallel_size": options.tp, "engine_args": options.engine_arg},
        "ray": {"address": f"127.0.0.1:{options.port}"},
        "train": {
            "source": "stream",
            "num_epochs": 1,
            "batch_tokens": options.step_tokens,
            "num_gpus": max(1, len(trainers)),
        },
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    return path


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--gpus", type=int, required=True, help="an even number; 0: one engine and one trainer on the CPU")
    add("--tp", type=int, default=1, help="GPUs of one engine")
    add("--target", type=Path, help="a model folder, in place of random weights")
    add("--arch", default="deepseek", choices=list(SHAPES))
    add("--layers", type=int, default=6)
    add("--experts", type=int, default=16)
    add("--vocab-size", type=int, default=32768)
    add("--shape", default="{}", help="JSON over the shape's config.json")
    add("--dtype", default="bfloat16")
    add("--length", type=int, default=1024, help="tokens of a row")
    add("--num-tokens", type=int, default=1_000_000)
    add("--batch-tokens", type=int, default=16384, help="of an engine's batch")
    add("--step-tokens", type=int, default=8192, help="of a training step, all trainers together")
    add("--engine-arg", action="append", default=[], help="name=value for vLLM; may be repeated")
    add("--port", type=int, default=6391, help="of the cluster")
    add("--work", type=Path, default=Path(tempfile.gettempdir()), help="where target and run are written")
    options = parser.parse_args()
    if options.gpus % 2:
        parser.error("--gpus is an even number")
    return options


if __name__ == "__main__":
    main()
