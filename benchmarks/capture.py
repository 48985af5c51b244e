"""Capture against plain prefill, in one run: the same engine, prompts and machine.

The capture counts until its last shard is checked, checksummed and on disk. Prints one JSON object a
prompt length. A shape needs no weights, so a GPU is enough for targets of any size:

    python benchmarks/capture.py --lengths 512,2048 --engine-arg attention_backend=FLASH_ATTN
    python benchmarks/capture.py --model ~/.cache/eyas/targets/... --lengths 128 --num-tokens 4000
"""

import argparse
import functools
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eyas.capture.capture_checks import check_states
from eyas.capture.checked_writer import Check, CheckedShardWriter, capture_into
from eyas.capture.final_state_check import FinalStateCheck
from eyas.config.schema import VllmSettings
from eyas.engines.base import Prompt, Sampling
from eyas.engines.probe import outside_envelope
from eyas.engines.vllm.engine import VllmEngine
from eyas.layer_ids import default_aux_layer_ids
from eyas.store.manifest import StoreManifest, plan_shards
from eyas.store.shards import ShardWriter
from eyas.targets.teacher import TeacherHead
from eyas.types import TargetSpec, TokenizedSample

SHAPE = {  # Llama-3.1-8B's
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


def main() -> None:
    options = parse()
    if options.tp_size == 1:
        # On a CPU vLLM keeps one core for itself, with a connector two: both shall compute on the same ones.
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", cores)
    with tempfile.TemporaryDirectory(dir=options.output) as scratch:
        folder = options.model or write_config(Path(scratch) / "shape", options)
        spec = read_spec(folder, options.dtype)
        further = tuple(options.engine_arg) + (() if options.model else ("load_format=dummy",))
        settings = VllmSettings(
            tensor_parallel_size=options.tp_size,
            gpu_memory_utilization=options.gpu_memory_utilization,
            capture=options.capture,
            staging_dir=options.staging_dir,
            staging_bytes=options.staging_bytes,
            engine_args=further,
            log_level=options.log_level,
        )
        longest = max(options.lengths)
        engine = VllmEngine(
            folder,
            spec,
            settings=settings,
            max_length=longest,
            batch_tokens=options.batch_tokens,
            batch_size=options.batch_size,
            in_process=options.in_process,
        )
        work = {n: make_samples(n, options.num_tokens, spec) for n in options.lengths}
        # The longest first: its engine takes the shorter ones too.
        plain = {n: measure_plain(engine, work[n], options.repeats) for n in sorted(work, reverse=True)}
        for length, samples in work.items():
            found = measure_capture(engine, samples, Path(scratch), options)
            result = {
                "prompt_tokens": length,
                "num_prompts": len(samples),
                "plain_tokens_per_s": round(plain[length]),
                **found,
                "share_of_plain": round(found["capture_tokens_per_s"] / plain[length], 4),
                "bytes_per_token": spec.bytes_per_token,
                "aux_layer_ids": spec.aux_layer_ids,
                **conditions(options, engine),
            }
            print(json.dumps(result), flush=True)
        engine.close()


def measure_plain(engine: VllmEngine, samples: list[TokenizedSample], repeats: int) -> float:
    """Return the best rate of prompts answered with one token, which is what prefill costs."""
    prompts = [Prompt(s.sample_id, tuple(s.input_ids.tolist())) for s in samples]
    warm_up = prompts[: max(4, len(prompts) // 8)]
    list(engine.generate(warm_up, Sampling(1)))
    seconds = [timed(lambda: list(engine.generate(prompts, Sampling(1)))) for _ in range(repeats)]
    note(f"plain, {len(samples[0])} tokens: {[round(s, 2) for s in seconds]} s")
    return sum(len(s) for s in samples) / min(seconds)


def measure_capture(
    engine: VllmEngine, samples: list[TokenizedSample], scratch: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """Return the best rate until the last shard is on disk, and what waited for what."""
    check = every_check(engine.spec)
    capture_to_disk(engine, samples[: max(4, len(samples) // 8)], check, scratch / "warm-up", options)
    runs = [
        capture_to_disk(engine, samples, check, scratch / f"run-{i}", options) for i in range(options.repeats)
    ]
    note(f"capture, {len(samples[0])} tokens: {[round(r['seconds'], 2) for r in runs]} s")
    best = min(runs, key=lambda r: r["seconds"])
    num_tokens = sum(len(s) for s in samples)
    return {
        "capture_tokens_per_s": round(num_tokens / best["seconds"]),
        "disk_mib_per_s": round(best["bytes"] / 2**20 / best["seconds"]),
        "engine_waited_for_disk_s": round(best["blocked_s"], 3),
        "after_last_state_s": round(best["tail_s"], 3),
    }


def capture_to_disk(
    engine: VllmEngine,
    samples: list[TokenizedSample],
    check: Check,
    folder: Path,
    options: argparse.Namespace,
) -> dict[str, float]:
    spec = engine.spec
    bounds = plan_shards([len(s) for s in samples], spec.bytes_per_token, options.shard_bytes)
    shards = {n: samples[a:b] for n, (a, b) in enumerate(itertools.pairwise(bounds))}
    started = time.perf_counter()
    store = ShardWriter(folder, StoreManifest(spec, "benchmark", bounds))
    with CheckedShardWriter(store, check, 0) as writer:
        for _ in capture_into(writer, engine, shards.items()):
            last_state = time.perf_counter()
    ended = time.perf_counter()
    shutil.rmtree(folder)
    return {
        "seconds": ended - started,
        "tail_s": ended - last_state,
        "blocked_s": writer.blocked_s,
        "bytes": writer.written_bytes,
    }


def every_check(spec: TargetSpec) -> Check:
    """Return what an extraction does to each sample, so lenient that states of dummy weights pass."""
    everything = torch.tensor([[0.0, float("inf")]] * spec.num_aux_layers)
    head = torch.randn(spec.vocab_size, spec.hidden_size, dtype=getattr(torch, spec.dtype))
    teacher = TeacherHead(torch.ones(spec.hidden_size), head, head, "rms", spec.norm_eps, None, 1.0)
    return functools.partial(
        check_states,
        spec=spec,
        outside=functools.partial(outside_envelope, envelope=everything),
        last_check=FinalStateCheck(spec, teacher, usual_misses=1.0, against_all=True),
    )


def timed(work: Any) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def make_samples(length: int, num_tokens: int, spec: TargetSpec) -> list[TokenizedSample]:
    """Return random prompts, every row of which is supervised: the most that can be asked for."""
    rng = np.random.default_rng(length)
    mask = np.ones(length, dtype=bool)
    return [
        TokenizedSample(
            f"{length}-{i}", rng.integers(3, spec.vocab_size, length).astype(np.int32), mask, cut=True
        )
        for i in range(max(8, num_tokens // length))
    ]


def write_config(folder: Path, options: argparse.Namespace) -> Path:
    """Write a config.json of the shape asked for; with load_format=dummy nothing else is needed."""
    shape = SHAPE | json.loads(options.shape)
    shape.setdefault("head_dim", shape["hidden_size"] // shape["num_attention_heads"])
    config = shape | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": options.dtype,
        "torch_dtype": options.dtype,
        "max_position_embeddings": max(8192, 2 * max(options.lengths)),
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def read_spec(folder: Path, dtype: str) -> TargetSpec:
    """Describe a target that may have neither tokenizer nor weights."""
    config = json.loads((folder / "config.json").read_text())
    num_layers = config["num_hidden_layers"]
    unknown = dict.fromkeys(("tokenizer_fingerprint", "template_fingerprint", "weights_fingerprint"), "none")
    copied = ("hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "intermediate_size",
              "max_position_embeddings")  # fmt: skip
    return TargetSpec(
        model=str(folder),
        revision=None,
        architecture=config["architectures"][0],
        num_layers=num_layers,
        aux_layer_ids=default_aux_layer_ids(num_layers),
        dtype=dtype,
        norm_kind="rms",
        norm_eps=config["rms_norm_eps"],
        logit_softcap=None,
        logit_scale=1.0,
        tied_head=config["tie_word_embeddings"],
        eos_token_ids=(2,),
        head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        **{key: config[key] for key in copied},
        **unknown,
    )


def conditions(options: argparse.Namespace, engine: VllmEngine) -> dict[str, Any]:
    import vllm

    on_gpu = torch.cuda.is_available()
    return {
        "way": engine.way,
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "tp_size": options.tp_size,
        "dtype": options.dtype,
        "batch_tokens": options.batch_tokens,
        "batch_size": options.batch_size,
        "shape": "model" if options.model else SHAPE | json.loads(options.shape),
        "date": time.strftime("%Y-%m-%d"),
    }


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--lengths", type=lambda text: [int(n) for n in text.split(",")], default=[512, 2048])
    add("--num-tokens", type=int, default=400_000, help="tokens of one measurement")
    add("--repeats", type=int, default=2, help="the best counts")
    add("--shape", default="{}", help='JSON over Llama-3.1-8B\'s shape, such as {"hidden_size": 5120}')
    add("--model", type=Path, help="a model folder with weights, in place of a shape")
    add("--dtype", default="bfloat16")
    add("--output", type=Path, default=Path(tempfile.gettempdir()), help="where shards are written")
    add("--staging-dir", type=Path)
    add("--staging-bytes", type=int, default=4 << 30)
    add("--shard-bytes", type=int, default=512 << 20)
    add("--batch-tokens", type=int, default=8192)
    add("--batch-size", type=int, default=256)
    add("--tp-size", type=int, default=1)
    add("--gpu-memory-utilization", type=float, default=0.9)
    add("--capture", default="auto", choices=["auto", "native", "worker"])
    add("--engine-arg", action="append", default=[], help="name=value for vLLM; may be repeated")
    add("--in-process", action="store_true", help="engine in this process")
    add("--log-level", default="ERROR")
    return parser.parse_args()


if __name__ == "__main__":
    main()
