"""Capture with tensor parallelism, at the width of the targets that need it.

Two parts; each prints one JSON object a tensor-parallel size:

equality  A model of random weights on disk, of few layers and experts: every probe of an extraction, the
          checksums of all ranks among them, and the states held against those of the first size given.
rate      As many layers as fit, without weights: capture until the last shard is checked, checksummed and
          on disk, against plain prefill by the same engine; bytes to disk; tokens its cache holds.

    python benchmarks/capture_tp.py equality --tp 1,2 --engine-arg attention_backend=TRITON_MLA
    python benchmarks/capture_tp.py rate --tp 1,2 --lengths 512,2048 --arch qwen3_moe

Shapes: ``deepseek`` is Kimi-K2.5's text model with fewer experts held (as many of them work on a token),
``qwen3_moe`` Qwen3-235B-A22B's, ``llama`` Llama-3.1-70B's; ``--shape`` changes single values.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from capture import conditions, make_samples, measure_capture, measure_plain, note, read_spec
from eyas.config.schema import VllmSettings
from eyas.engines.probe import STATE_TOLERANCE, ProbeError, layer_names, probe, probe_samples, row_norms
from eyas.engines.vllm.engine import VllmEngine
from eyas.targets.teacher import TeacherHead
from eyas.targets.weights import Weights
from eyas.types import HiddenStates, TargetSpec, TokenizedSample

COMMON = {"rms_norm_eps": 1e-5, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
          "tie_word_embeddings": False, "max_position_embeddings": 8192}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "deepseek": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 163840,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.827,
        "scoring_func": "sigmoid",
        "rope_theta": 50000.0,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1536,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rope_theta": 1000000.0,
    },
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "rope_theta": 500000.0,
    },
}
EXPERTS = {"deepseek": "n_routed_experts", "qwen3_moe": "num_experts"}


def layer_tensors(c: dict[str, Any], layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of each tensor of one layer, as the hub's checkpoints have them."""
    p, width, heads = f"model.layers.{layer}.", c["hidden_size"], c["num_attention_heads"]
    yield p + "input_layernorm.weight", (width,)
    yield p + "post_attention_layernorm.weight", (width,)
    a = p + "self_attn."
    if c["model_type"] == "deepseek_v3":
        head = c["qk_nope_head_dim"] + c["qk_rope_head_dim"]
        yield a + "q_a_proj.weight", (c["q_lora_rank"], width)
        yield a + "q_a_layernorm.weight", (c["q_lora_rank"],)
        yield a + "q_b_proj.weight", (heads * head, c["q_lora_rank"])
        yield a + "kv_a_proj_with_mqa.weight", (c["kv_lora_rank"] + c["qk_rope_head_dim"], width)
        yield a + "kv_a_layernorm.weight", (c["kv_lora_rank"],)
        yield a + "kv_b_proj.weight", (heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), c["kv_lora_rank"])
        yield a + "o_proj.weight", (width, heads * c["v_head_dim"])
    else:
        head, kv = c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
        yield a + "q_proj.weight", (heads * head, width)
        yield a + "k_proj.weight", (kv, width)
        yield a + "v_proj.weight", (kv, width)
        yield a + "o_proj.weight", (width, heads * head)
        if c["model_type"] == "qwen3_moe":
            yield a + "q_norm.weight", (head,)
            yield a + "k_norm.weight", (head,)
    m = p + "mlp."
    num_experts = num_experts_of(c)
    if not num_experts or layer < c.get("first_k_dense_replace", 0):
        yield from _mlp(m, width, c["intermediate_size"])
        return
    yield m + "gate.weight", (num_experts, width)
    for e in range(num_experts):
        yield from _mlp(f"{m}experts.{e}.", width, c["moe_intermediate_size"])
    if c["model_type"] == "deepseek_v3":
        yield m + "gate.e_score_correction_bias", (num_experts,)
        yield from _mlp(f"{m}shared_experts.", width, c["moe_intermediate_size"] * c["n_shared_experts"])


def _mlp(prefix: str, width: int, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, shape in (("gate", (inner, width)), ("up", (inner, width)), ("down", (width, inner))):
        yield f"{prefix}{name}_proj.weight", shape


def num_experts_of(config: dict[str, Any]) -> int:
    return int(config.get("n_routed_experts") or config.get("num_experts") or 0)


def write_weights(folder: Path, config: dict[str, Any], dtype: torch.dtype) -> None:
    """Write random weights, one file a layer; parts of one pool of random numbers, which is much faster."""
    pool = torch.randn(1 << 26, generator=torch.Generator().manual_seed(0))
    start = 0

    def random(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        nonlocal start
        if len(shape) == 1:
            fill = 0.0 if name.endswith("bias") else 1.0
            return torch.full(shape, fill, dtype=dtype)
        # A router of wide scores, short of where a sigmoid is flat: where experts tie, rounding chooses.
        scale = (2.0 if name.endswith("mlp.gate.weight") else 1.0) * shape[1] ** -0.5
        start = (start + 7919) % (1 << 25)
        flat = torch.empty(shape[0] * shape[1], dtype=dtype)
        piece = len(pool) - (1 << 25)
        for at in range(0, len(flat), piece):
            part = flat[at : at + piece]
            part.copy_(pool[start : start + len(part)] * scale)
        return flat.view(shape)

    width, vocab = config["hidden_size"], config["vocab_size"]
    ends = [("model.embed_tokens.weight", (vocab, width)), ("model.norm.weight", (width,)),
            ("lm_head.weight", (vocab, width))]  # fmt: skip
    files = [ends, *(list(layer_tensors(config, i)) for i in range(config["num_hidden_layers"]))]
    where = {}
    for number, tensors in enumerate(files):
        file = f"model-{number:05d}.safetensors"
        save_file({n: random(n, s) for n, s in tensors}, folder / file, {"format": "pt"})
        where |= {n: file for n, _ in tensors}
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_config(folder: Path, options: argparse.Namespace, **changes: Any) -> dict[str, Any]:
    config = SHAPES[options.arch] | COMMON | {"dtype": options.dtype, "torch_dtype": options.dtype}
    config |= changes | json.loads(options.shape)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return config


def layers_that_fit(config: dict[str, Any], num_bytes: float, itemsize: int = 2) -> int:
    """Return how many layers ``num_bytes`` of GPU memory hold beside embedding and head."""
    sizes = [sum(torch.Size(s).numel() for _, s in layer_tensors(config, i)) for i in (0, 1)]
    ends = 2 * config["vocab_size"] * config["hidden_size"]
    fit = 1 + (num_bytes / itemsize - ends - sizes[0]) // sizes[1]
    return int(min(config["num_hidden_layers"], fit))


def start(folder: Path, spec: TargetSpec, options: argparse.Namespace, dummy: bool) -> VllmEngine:
    further = tuple(options.engine_arg) + (("load_format=dummy",) if dummy else ())
    settings = VllmSettings(
        tensor_parallel_size=options.tp_size,
        gpu_memory_utilization=options.gpu_memory_utilization,
        capture=options.capture,
        staging_bytes=options.staging_bytes,
        engine_args=further,
        log_level=options.log_level,
    )
    return VllmEngine(
        folder,
        spec,
        settings=settings,
        max_length=max(options.lengths),
        batch_tokens=options.batch_tokens,
        batch_size=options.batch_size,
    )


def equality(options: argparse.Namespace, scratch: Path) -> None:
    folder = scratch / "shape"
    changes = {"num_hidden_layers": options.layers or 8, "vocab_size": 32768}
    if options.arch in EXPERTS:
        changes[EXPERTS[options.arch]] = options.experts or 16
    config = write_config(folder, options, **changes)
    write_weights(folder, config, getattr(torch, options.dtype))
    spec = read_spec(folder, options.dtype)
    norm, head = (Weights(folder).read(f"{name}.weight") for name in ("model.norm", "lm_head"))
    teacher = TeacherHead(norm, head, head, "rms", config["rms_norm_eps"], None, 1.0).to("cpu", torch.float32)
    samples = [s for n in options.lengths for s in make_samples(n, 8 * n, spec)]
    first: dict[str, torch.Tensor] = {}
    for size in options.tp:
        options.tp_size = size
        engine = start(folder, spec, options, dummy=False)
        try:
            probed = probe(engine, spec, probe_samples(samples), lambda last: teacher.logits(last.float()))
            passed, digests = "passed", len(engine.probe_outputs(probed.samples[:1])[0].rank_digests)  # type: ignore[union-attr]
        except ProbeError as error:
            note(str(error))
            passed, digests = error.what, 0
        found = {
            i.sample.sample_id: joined(i) for i in engine.capture(samples) if isinstance(i, HiddenStates)
        }
        out = {
            "part": "equality",
            "probe": passed,
            "ranks_compared": digests,
            "lost": len(samples) - len(found),
        }
        if first:
            out |= differences(found, first, samples, spec)
        else:
            first = found
        print(json.dumps(out | {"layers": spec.num_layers} | facts(options, engine)), flush=True)
        engine.close()


def joined(states: HiddenStates) -> torch.Tensor:
    return torch.cat([states.aux, states.last[:, None]], dim=1)


def differences(
    found: dict[str, torch.Tensor],
    first: dict[str, torch.Tensor],
    samples: list[TokenizedSample],
    spec: TargetSpec,
) -> dict[str, Any]:
    """Return how far rows are from the first size's, relative to each row's norm."""
    each = [
        row_norms(found[s.sample_id].float() - first[s.sample_id].float())
        / row_norms(first[s.sample_id].float())
        for s in samples
    ]
    rows = torch.cat(each)  # (N, A + 1)
    tolerance = STATE_TOLERANCE[spec.dtype]
    return {
        "tolerance": tolerance,
        "rows": len(rows),
        "rows_within": {
            n: round(float((c <= tolerance).float().mean()), 5)
            for n, c in zip(layer_names(spec), rows.T, strict=True)
        },
        "median": [float(f"{v:.2e}") for v in rows.median(0).values],
        "largest": [float(f"{v:.2e}") for v in rows.amax(0)],
    }


def rate(options: argparse.Namespace, scratch: Path) -> None:
    config = dict(SHAPES[options.arch])
    if options.arch in EXPERTS:
        config[EXPERTS[options.arch]] = options.experts or min(64, num_experts_of(config))
    if "routed_scaling_factor" in config:
        # Dummy weights are so small that experts would leave the stream as it is, and all layers equal.
        config["routed_scaling_factor"] = 1e8
    smallest = min(options.tp)
    room = torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else 1 << 30
    layers = options.layers or layers_that_fit(config, options.weight_share * room * smallest)
    folder = scratch / "shape"
    write_config(folder, options, **config | {"num_hidden_layers": layers})
    spec = read_spec(folder, options.dtype)
    work = {n: make_samples(n, options.num_tokens, spec) for n in options.lengths}
    for size in options.tp:
        options.tp_size = size
        engine = start(folder, spec, options, dummy=True)
        plain = {n: measure_plain(engine, work[n], options.repeats) for n in sorted(work, reverse=True)}
        plain_tokens = cache_tokens(engine)
        for length, samples in work.items():
            found = measure_capture(engine, samples, scratch, options)
            captured = found["capture_tokens_per_s"] * spec.bytes_per_token
            out = {
                "part": "rate",
                "prompt_tokens": length,
                "num_prompts": len(samples),
                "layers": layers,
                "experts": num_experts_of(config),
                "plain_tokens_per_s": round(plain[length]),
                **found,
                "gb_per_s_to_disk": round(captured / 1e9, 2),
                "share_of_plain": round(found["capture_tokens_per_s"] / plain[length], 4),
                "bytes_per_token": spec.bytes_per_token,
                "cache_tokens_plain": plain_tokens,
                "cache_tokens_capturing": cache_tokens(engine),
                "aux_layer_ids": spec.aux_layer_ids,
            }
            print(json.dumps(out | facts(options, engine)), flush=True)
        engine.close()


def cache_tokens(engine: VllmEngine) -> int | None:
    """Return how many tokens the running vLLM's cache holds, as it says itself."""
    session = engine._session
    assert session is not None
    cache = session.engine.vllm_config.cache_config
    return cache.num_gpu_blocks * cache.block_size if cache.num_gpu_blocks else None


def facts(options: argparse.Namespace, engine: VllmEngine) -> dict[str, Any]:
    return conditions(options, engine) | {"shape": options.arch, "changed": json.loads(options.shape)}


def main() -> None:
    options = parse()
    scratch = Path(tempfile.mkdtemp(dir=options.output))
    try:
        {"equality": equality, "rate": rate}[options.part](options, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    numbers = lambda text: [int(n) for n in text.split(",")]  # noqa: E731
    add("part", choices=["equality", "rate"])
    add("--tp", type=numbers, default=[1], help="tensor-parallel sizes, such as 1,2,4,8")
    add("--arch", default="deepseek", choices=list(SHAPES))
    add("--layers", type=int, help="default: 8 for equality; as many as fit the smallest size for rate")
    add("--experts", type=int, help="experts held a layer; default: 16 for equality, 64 for rate")
    add("--shape", default="{}", help="JSON over the shape's config.json")
    add("--lengths", type=numbers, default=[512, 1024, 2048])
    add("--num-tokens", type=int, default=262_144, help="tokens of one measurement of rate")
    add("--repeats", type=int, default=2, help="the best counts")
    add("--dtype", default="bfloat16")
    add(
        "--output",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="where weights and shards are written",
    )
    add("--weight-share", type=float, default=0.65, help="share of GPU memory for weights")
    add("--staging-bytes", type=int, default=4 << 30)
    add("--shard-bytes", type=int, default=1 << 30)
    add("--batch-tokens", type=int, default=8192)
    add("--batch-size", type=int, default=256)
    add("--gpu-memory-utilization", type=float, default=0.9)
    add("--capture", default="auto", choices=["auto", "native", "worker"])
    add("--engine-arg", action="append", default=[], help="name=value for vLLM; may be repeated")
    add("--log-level", default="ERROR")
    options = parser.parse_args()
    options.model, options.in_process, options.staging_dir = None, False, None
    print(" ".join(sys.argv), file=sys.stderr)
    return options


if __name__ == "__main__":
    main()
