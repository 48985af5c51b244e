"""The real vLLM decodes with an exported draft as eyas does: same text, same draft tokens accepted."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.config.load import load_config
from eyas.evaluate.decode import DraftChain, decode_speculative
from eyas.export.vllm import load_export
from eyas.stages.context import RunContext
from eyas.targets.teacher import read_teacher
from eyas.train.metrics import Acceptance
from pipeline import eyas, write_run

NUM_DRAFT_TOKENS, NUM_TOKENS, NUM_PROMPTS = 3, 40, 6
PROMPTS = [[5 + (7 * i + 3 * j) % 90 for j in range(6 + 3 * i)] for i in range(NUM_PROMPTS)]
# Each changes what the draft computes, so each has to be the engine's too.
SHAPES = {
    "plain": [],
    "fc_norm": ["draft.fc_norm=true"],
    "norm_output": ["draft.norm_output=true"],
    "eagle 3.1": ["draft.fc_norm=true", "draft.norm_output=true"],
    "two layers": ["draft.num_layers=2"],
}

_ENGINE = """
import json, sys
from vllm import LLM, SamplingParams

target, drafts, prompts, out, num_tokens, num_draft_tokens = sys.argv[1:]
prompts = [{"prompt_token_ids": p} for p in json.loads(prompts)]
sampling = SamplingParams(max_tokens=int(num_tokens), temperature=0, ignore_eos=True)
settings = dict(
    model=target, dtype="float32", enforce_eager=True, max_model_len=128, max_num_seqs=8,
    kv_cache_memory_bytes=1 << 26, enable_prefix_caching=False, disable_log_stats=False,
)


def answers(llm):
    return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, sampling, use_tqdm=False)]


def counters(llm):
    found = {}
    for metric in llm.get_metrics():
        name = metric.name.removeprefix("vllm:spec_decode_")
        if name != metric.name:
            found[name] = metric.values if hasattr(metric, "values") else metric.value
    return found


result = {}
for shape, draft in json.loads(drafts).items():
    speculative = {"method": "eagle3", "model": draft, "num_speculative_tokens": int(num_draft_tokens)}
    llm = LLM(**settings, speculative_config=speculative)
    result[shape] = {"text": answers(llm), **counters(llm)}
    del llm
result["target alone"] = {"text": answers(LLM(**settings))}
open(out, "w").write(json.dumps(result))
"""


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> RunContext:
    folder = tmp_path_factory.mktemp("decodes")
    run_file = write_run(folder, tiny_target, train={"num_epochs": 6, "learning_rate": 4e-3})
    for stage in ("prepare", "regenerate", "extract"):
        assert eyas(stage, "-c", run_file).code == 0
    return RunContext(load_config(run_file))


@pytest.fixture(scope="module")
def drafts(context: RunContext) -> dict[str, Path]:
    """Trained and exported drafts by shape."""
    folders = {}
    run_file = context.config.run_dir.parent / "run.yaml"
    for shape, overrides in SHAPES.items():
        for stage in ("train", "export"):
            screen = eyas(stage, "-c", run_file, *overrides, "--fresh")
            assert screen.code == 0, screen.err
        folders[shape] = context.config.run_dir.parent / shape.replace(" ", "-")
        shutil.copytree(context.folder("export"), folders[shape])
    return folders


@pytest.fixture(scope="module")
def served(context: RunContext, drafts: dict[str, Path]) -> dict[str, Any]:
    """What one process of vLLM answers and counts with each draft in turn."""
    out = context.config.run_dir.parent / "engine.json"
    names = json.dumps({shape: str(folder) for shape, folder in drafts.items()})
    script = [sys.executable, "-c", _ENGINE, str(context.target_folder), names, json.dumps(PROMPTS), str(out)]
    script += [str(NUM_TOKENS), str(NUM_DRAFT_TOKENS)]
    quiet = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(script, env=os.environ | quiet, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(out.read_text()))


@pytest.mark.xdist_group("vllm")
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
@pytest.mark.parametrize("shape", SHAPES)
def test_vllm_accepts_the_draft_tokens_that_eyas_accepts(
    context: RunContext, drafts: dict[str, Path], served: dict[str, Any], shape: str
) -> None:
    ours, total = decode_here(context, drafts[shape])
    engine = served[shape]
    assert engine["text"] == served["target alone"]["text"] == ours
    # Rounds are the same; of a request's last one vLLM also counts what it accepts behind the limit.
    assert engine["num_drafts"] == total.num_rounds
    surplus = [e - o for e, o in zip(engine["num_accepted_tokens_per_pos"], total.accepted_at, strict=True)]
    assert all(0 <= s <= NUM_PROMPTS for s in surplus)
    assert sum(total.accepted_at) > NUM_PROMPTS


def decode_here(context: RunContext, folder: Path) -> tuple[list[list[int]], Acceptance]:
    teacher = read_teacher(context.target_folder, context.spec).to("cpu", torch.float32)
    draft, target_ids, _ = load_export(folder, teacher.embedding)
    engine: Any = context.make_engine("transformers")
    total = Acceptance.empty(NUM_DRAFT_TOKENS)
    answers = []
    for prompt in PROMPTS:
        chain = DraftChain(draft, target_ids)
        decoded = decode_speculative(engine.session(), chain, prompt, NUM_DRAFT_TOKENS, NUM_TOKENS, ())
        answers.append(decoded.token_ids)
        assert decoded.acceptance is not None
        total += decoded.acceptance
    return answers, total
