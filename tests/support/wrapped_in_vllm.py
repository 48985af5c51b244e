"""Runs the tiny wrappers of several modalities through the real vLLM; prints one JSON line each.

Run by tests/contract/test_vllm_wrappers.py in a process whose PYTHONPATH has a stub of torchvision.
"""

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from eyas.config.schema import VllmSettings
from eyas.drafters.eagle3 import vllm
from eyas.drafters.eagle3.config import draft_config_for
from eyas.drafters.eagle3.model import Eagle3Draft
from eyas.engines.base import Prompt, Sampling
from eyas.engines.transformers.engine import TransformersEngine
from eyas.errors import UserError
from eyas.export.native import NativeExporter
from eyas.targets.teacher import read_teacher
from eyas.types import TargetSpec, VocabMap
from families import make_family
from pipeline import change_json
from tiny import spec_of
from vllm_cases import mixed_samples, reference_states, states_by_id, worst_difference

WRAPPERS = ("llama4-wrapped", "mistral3-wrapped", "gemma3-wrapped", "qwen3.5-wrapped", "kimi-k2.5")
PROMPTS = [Prompt(f"p{i}", tuple(5 + (7 * i + 3 * j) % 90 for j in range(6 + 3 * i))) for i in range(6)]
NUM_TOKENS = 16


def run_one(root: Path, name: str) -> dict[str, Any]:
    """Capture, regenerate and decode with a draft that has not learned; compare each with transformers."""
    from eyas.engines.vllm.engine import VllmEngine

    folder = make_family(root / "target", name)
    if name == "qwen3.5-wrapped":
        to_bfloat16(folder)  # the CPU's kernels for its linear attention take no other
    spec = spec_of(folder, (1, 2, 3))
    samples = mixed_samples([1, 7, 64, 65, 200], vocab_size=spec.vocab_size)
    known = reference_states(folder, spec, samples)
    with closing(TransformersEngine(folder, spec)) as reference:
        own = {answer.prompt_id: answer for answer in reference.generate(PROMPTS, Sampling(NUM_TOKENS))}
    with closing(VllmEngine(folder, spec, batch_tokens=64, batch_size=4, in_process=True)) as engine:
        found = {"way": engine.way, "dtype": spec.dtype}
        found["difference"] = worst_difference(states_by_id(engine.capture(samples)), known)
        answers = {a.prompt_id: a for a in engine.generate(PROMPTS, Sampling(NUM_TOKENS))}
    found["regenerated"] = sum(answers[p].token_ids == own[p].token_ids for p in own)
    try:
        found |= decode(folder, write_draft(root / "draft", folder, spec), spec, answers)
    except UserError as error:
        found["refused"] = error.what
    return found


def to_bfloat16(folder: Path) -> None:
    weights = folder / "model.safetensors"
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(weights).items()}
    save_file(tensors, weights, metadata={"format": "pt"})
    text = json.loads((folder / "config.json").read_text())["text_config"] | {"dtype": "bfloat16"}
    change_json(folder / "config.json", dtype="bfloat16", text_config=text)


def write_draft(out: Path, folder: Path, spec: TargetSpec) -> Path:
    teacher = read_teacher(folder, spec)
    vocab = VocabMap(np.arange(0, spec.vocab_size, 2), spec.vocab_size)
    draft = Eagle3Draft(draft_config_for(spec, len(vocab)))
    tables = (teacher.embedding, teacher.head[vocab.target_ids], teacher.norm_weight)
    draft.initialise(*(table.float() for table in tables), {}, seed=0)
    out.mkdir()
    NativeExporter("eagle3").write(out, draft, spec, vocab)
    return out


def decode(folder: Path, draft: Path, spec: TargetSpec, answers: dict[str, Any]) -> dict[str, Any]:
    """Return how many answers are vLLM's own without the draft, and how many rounds there were."""
    from eyas.engines.vllm.decoder import VllmDecoder

    decoder = VllmDecoder(
        folder,
        spec,
        draft=draft,
        num_draft_tokens=2,
        kind=vllm,
        settings=VllmSettings(),
        max_length=128,
        max_concurrency=4,
        in_process=True,
    )
    with closing(decoder):
        served = decoder.answer(PROMPTS, 4, Sampling(NUM_TOKENS)).answers
        same = sum(served[p].token_ids == answers[p].token_ids for p in answers)
        return {"decoded": same, "rounds": decoder.counters().rounds}


if __name__ == "__main__":
    torch.manual_seed(0)
    for name in sys.argv[2:] or WRAPPERS:
        root = Path(sys.argv[1]) / name
        root.mkdir(parents=True)
        print(json.dumps({"name": name} | run_one(root, name)), flush=True)
