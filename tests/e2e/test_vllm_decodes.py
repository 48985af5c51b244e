"""The real vLLM decodes with an exported draft as eyas does: same text, same draft tokens accepted."""

import importlib.util
import json
import os
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
from tiny import make_target

NUM_DRAFT_TOKENS, NUM_TOKENS, NUM_PROMPTS = 3, 40, 6

_ENGINE = """
import json, sys
from vllm import LLM, SamplingParams

target, draft, prompts, out, num_tokens, num_draft_tokens = sys.argv[1:]
prompts = [{"prompt_token_ids": p} for p in json.load(open(prompts))]
longest = max(len(p["prompt_token_ids"]) for p in prompts) + int(num_tokens) + 8
sampling = SamplingParams(max_tokens=int(num_tokens), temperature=0, ignore_eos=True)
settings = dict(
    model=target, dtype="float32", enforce_eager=True, max_model_len=longest, max_num_seqs=8,
    kv_cache_memory_bytes=1 << 26, enable_prefix_caching=False, disable_log_stats=False,
)


def answers(llm):
    return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, sampling, use_tqdm=False)]


speculative = {"method": "eagle3", "model": draft, "num_speculative_tokens": int(num_draft_tokens)}
drafted = LLM(**settings, speculative_config=speculative)
result = {"drafted": answers(drafted)}
for metric in drafted.get_metrics():
    name = metric.name.removeprefix("vllm:spec_decode_")
    if name != metric.name:
        result[name] = metric.values if hasattr(metric, "values") else metric.value
del drafted
result["plain"] = answers(LLM(**settings))
open(out, "w").write(json.dumps(result))
"""


@pytest.fixture(scope="module")
def far_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose positions are stretched from 1024 to 4096."""
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
    }
    folder = tmp_path_factory.mktemp("targets") / "far"
    return make_target(folder, max_position_embeddings=4096, rope_parameters=rope)


@pytest.mark.xdist_group("vllm")
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
@pytest.mark.parametrize(
    ("target", "draft_settings", "first_length", "least_accepted"),
    [
        ("tiny_target", {}, 6, NUM_PROMPTS),
        # Beyond 2048 positions, with the target's YaRN, by a draft of another width than the target's.
        ("far_target", {"hidden_size": 64}, 2040, 1),
    ],
    ids=["near", "far"],
)
def test_vllm_accepts_the_draft_tokens_that_eyas_accepts(
    tmp_path: Path,
    request: pytest.FixtureRequest,
    target: str,
    draft_settings: dict[str, int],
    first_length: int,
    least_accepted: int,
) -> None:
    target_folder = request.getfixturevalue(target)
    train = {"num_epochs": 6, "learning_rate": 4e-3}
    run_file = write_run(tmp_path, target_folder, train=train, draft=draft_settings)
    assert eyas("run", "-c", run_file).code == 0
    context = RunContext(load_config(run_file))
    lengths = [first_length + 3 * i for i in range(NUM_PROMPTS)]
    prompts = [[5 + (7 * i + 3 * j) % 90 for j in range(length)] for i, length in enumerate(lengths)]
    ours, total = decode_here(context, prompts)

    out, asked = tmp_path / "engine.json", tmp_path / "prompts.json"
    asked.write_text(json.dumps(prompts))
    draft = str(context.folder("export"))
    script = [sys.executable, "-c", _ENGINE, str(target_folder), draft, str(asked), str(out)]
    script += [str(NUM_TOKENS), str(NUM_DRAFT_TOKENS)]
    quiet = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(script, env=os.environ | quiet, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    engine = json.loads(out.read_text())

    assert engine["plain"] == engine["drafted"] == ours
    # Rounds are the same; of a request's last one vLLM also counts what it accepts behind the limit.
    assert engine["num_drafts"] == total.num_rounds
    surplus = [e - o for e, o in zip(engine["num_accepted_tokens_per_pos"], total.accepted_at, strict=True)]
    assert all(0 <= s <= NUM_PROMPTS for s in surplus)
    assert sum(total.accepted_at) >= least_accepted


def decode_here(context: RunContext, prompts: list[list[int]]) -> tuple[list[list[int]], Acceptance]:
    teacher = read_teacher(context.target_folder, context.spec).to("cpu", torch.float32)
    draft, target_ids, _ = load_export(context.folder("export"), teacher.embedding)
    engine: Any = context.make_engine("transformers")
    total = Acceptance.empty(NUM_DRAFT_TOKENS)
    answers = []
    for prompt in prompts:
        chain = DraftChain(draft, target_ids)
        decoded = decode_speculative(engine.session(), chain, prompt, NUM_DRAFT_TOKENS, NUM_TOKENS, ())
        answers.append(decoded.token_ids)
        assert decoded.acceptance is not None
        total += decoded.acceptance
    return answers, total
