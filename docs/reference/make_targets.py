"""Writes targets.md from the table of families, the tiny models of the tests, and the last run of vLLM.

python docs/reference/make_targets.py
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1] / "tests/support"), str(HERE.parents[1] / "src")]

from eyas.targets.architectures import FAMILIES, Family  # noqa: E402
from families import TINY, Tiny  # noqa: E402
from oddities import ODDITIES  # noqa: E402

HEAD = """# Supported targets

Made by `docs/reference/make_targets.py`; a test holds it to the code. Each row is a tiny random model of the true class
(`tests/support/families.py`). In transformers {transformers} every row has passed `tests/contract/test_families.py`: the
description read from its files; the teacher rebuilt from the last hidden state gives the model's own logits; every layer id
is the index of transformers' `hidden_states`; answers do not depend on their batch; a draft learns, is exported and loads.

The last two columns are a run of `benchmarks/targets_in_vllm.py` with {engine} on two CPU cores: how states were captured
and the largest difference from transformers relative to a layer, and whether vLLM decoded with the exported draft to
transformers' own text, token for token. What a row lacks there, its remark explains. Targets of several modalities are started with
`language_model_only`, as eyas starts them; torchvision, which vLLM's modules for them import, was a stub there. In bfloat16 one near-tie makes a "no". Latent attention ran with
`VLLM_MLA_DISABLE=1`: that build's kernels for it take heads of 576 only.

| target | architecture in config.json | final norm | logits | states in vLLM | decodes in vLLM |
| --- | --- | --- | --- | --- | --- |
"""

TAIL = """
## How a target may be stored

One safetensors file or many, with an index or without, tied or untied; a second copy in the maker's own format
(`consolidated*`) is left alone. Every file is checked to be there and whole before anything runs. The text model may lie
inside a wrapper of several modalities.

## What a target's folder can hold

Each row is made from a tiny model (`tests/support/oddities.py`) and read by every verb, from a folder, a URL and the hub's cache
(`tests/contract/test_one_reader.py`). Where only wrappers can have it, all five families of them are tried. The last two columns are
a run of `benchmarks/oddities_in_engines.py`: transformers {transformers} and {vllm} were started with each folder and answered
{num_prompts} prompts greedily. Of each: the type it computes in, how many prompts vLLM rendered to the same token ids, and how many answers are
those of the model that eyas takes the folder for. Tiny random models have near ties, so answers in bfloat16 may differ. Both start the
folder of an adapter as the model without it, and neither ties a head that only `text_config` ties; eyas refuses the one, and the
probe stops an engine that computes the other.

{oddities}
Of the weights the trainer reads the embedding, the final norm and the head, by byte range, and the dense weights of the last
layer that a draft can start from: also from a hub or a bucket (`target.model: s3://bucket/model`, `https://…`, or a hub id).
Only an engine needs the whole model on its machine.

| quantisation of embedding or head | read |
| --- | --- |
| compressed-tensors `pack-quantized`, 4 or 8 bits, symmetric, a scale a group or row, reordered or not | yes |
| FP8 with a scale for the tensor, the row, or blocks of 128 x 128 | yes |
| GPTQ, AWQ, NVFP4, MXFP4, bitsandbytes, asymmetric integers | refused by name; most checkpoints leave the head alone |

## What identifies the weights

The fingerprint of a target holds every tensor's name, type and shape, and 4 KiB of each tensor at a position that its name decides;
of numbered experts one in 64 of each layer is sampled, of experts in one tensor 4 KiB for each 64. It does not depend on how the
tensors are spread over files. A fine-tune, a merged adapter or another quantisation changes almost every tensor and is seen. What can
escape is an edit of a few rows of one tensor (the rows of added tokens in an embedding), or of experts that are not sampled. To
compare every byte, set `target.fingerprint: full`: all weights are then read by every command that looks at the target. Stores and
exports of eyas 0.1 are compared by its own fingerprint (sizes and ends of the files), which misses most merged adapters.

Quantised layers are the engine's business; the draft never inherits `quantization_config`. Experts in compressed-tensors INT4
(W4A16, groups of 32, as Kimi-K2.5 ships) were run through transformers and equal the dequantised model. vLLM's CPU build has
such a kernel for processors with AMX tiles only, and vLLM 0.32 refuses Kimi-K2.5's groups of 32 there too ("kernel does not
support quantization scheme uint4b8").

## What a draft takes over

Width, MLP, heads, rotary base and scaling (linear, llama3, YaRN), and the largest position. A target that attends over latents,
or a draft of another width (`draft.hidden_size`), gets heads of 128 (or 64, 32) instead. YaRN's `mscale` is dropped, and
`longrope`, `dynamic`, partial and multimodal rotation become plain: engines differ there, and the draft learns with what
serves it. A draft of another width carries an embedding of its own, which vLLM loads and SGLang does not.

`draft.attention: mla` gives the draft the latent attention of a DeepSeek-like target (DeepSeek-V2/V3, Kimi-K2/K2.5) instead: its
ranks, head widths and YaRN with both values of `mscale`, and a start from the last layer's weights. It trains on the plain path,
slower than the kernels for grouped heads, and is exported as vLLM's and SGLang's `Eagle3DeepseekV2ForCausalLM`. Its `model_type`
is `deepseek_v2`: vLLM 0.32 takes a draft of type `deepseek_v3` for the target's own MTP layer and refuses it. vLLM 0.32's CPU
build decoded with such a draft as eyas does, same text and same accepted tokens, with the real latent kernels, which take a
latent of 512 and 64 only; `VLLM_MLA_DISABLE=1` is no way round, for the draft's class ignores it ("No common block size"). Not
possible: a target without `q_lora_rank` (DeepSeek-V2-Lite; vLLM's loader of drafts needs one), the speculators format (vLLM maps
Llama and Qwen3 only), several such layers in SGLang. On SGLang it is by contract: it cannot run here.

## A further architecture

Needs a line in `eyas/targets/architectures.py` (how its final norm uses its weight, what happens to its logits) and a tiny model
of its class in `tests/support/families.py`. Anything else is refused with the closest match: a guess could train on a wrong teacher
without an error.
"""


def targets_page() -> str:
    results = json.loads((HERE / "targets-in-vllm.json").read_text())
    rows = [_row(name, tiny, results.get(name, {})) for name, tiny in TINY.items()]
    remarks = [f"- {name}: {_remark(r['error'])}" for name in TINY if "error" in (r := results.get(name, {}))]
    head = HEAD.format(transformers=version("transformers"), engine=results["engine"])
    tried = json.loads((HERE / "oddities-in-engines.json").read_text())
    tail = TAIL.replace("{oddities}", _oddities(tried)).replace("{num_prompts}", str(tried["num_prompts"]))
    tail = tail.replace("{transformers}", tried["versions"]["transformers"]).replace(
        "{vllm}", tried["versions"]["vllm"]
    )
    return head + "".join(rows) + "\nRemarks:\n\n" + "\n".join(remarks) + "\n" + tail


def _oddities(tried: dict[str, Any]) -> str:
    rows = [
        "| folder | seen in | eyas takes it for | transformers | vLLM |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, oddity in ODDITIES.items():
        verdicts = [
            _verdict(tried[name][engine], tried["num_prompts"]) for engine in ("transformers", "vllm")
        ]
        rows.append(f"| {oddity.what} | {oddity.seen} | {oddity.reads} | {' | '.join(verdicts)} |")
    return "\n".join(rows) + "\n"


def _verdict(found: dict[str, Any], num_prompts: int) -> str:
    if "error" in found:
        return f"fails: {found['error']}"
    parts = [found["dtype"]]
    if not found.get("has_template", True):
        parts.append("its tokenizer has no template")
    parts += [f"{found[what]} of {num_prompts} {what}" for what in ("prompts", "answers") if what in found]
    return ", ".join(parts)


# What vLLM said, and what it means.
_MEANINGS = {
    "does not support EAGLE3 interface": "vLLM's class has no EAGLE-3 interface: states by hooks, and no draft is served",
    "The expanded size of the tensor": "not a class of vLLM's own; its wrapper around transformers fails here: {error}",
    "states of s0 are not finite": "vLLM gives states that are not finite for this tiny shape; the capture's checks refuse them",
}


def _remark(error: str) -> str:
    error = error.replace("[rank0]: ", "").replace("eyas.errors.EyasError: ", "")
    for sign, meaning in _MEANINGS.items():
        if sign in error:
            return meaning.format(error=error)
    return error


def _row(name: str, tiny: Tiny, result: dict[str, Any]) -> str:
    architecture = tiny.released_as or tiny.architecture
    family = FAMILIES[architecture]
    norm = {"rms": "RMS", "rms_one_plus": "RMS, (1 + w)", "layer": "LayerNorm"}[family.norm_kind]
    states = f"{result['way']}, {result['difference']:.0e}" if "difference" in result else "remark"
    if result.get("dtype") == "bfloat16" and "difference" in result:
        states += " (bfloat16)"
    if result.get("difference", 0) > 0.06:
        states += ", not equal: do not trust"
    decodes = {True: "yes", False: "no", None: "remark"}[result.get("decodes")]
    target = f"{family.name} ({name})"
    return f"| {target} | {architecture} | {norm} | {_logits(family, tiny)} | {states} | {decodes} |\n"


def _logits(family: Family, tiny: Tiny) -> str:
    words = ["tied head"] if tiny.tied else []
    words += ["soft cap"] if family.softcap_key else []
    words += [f"/ {family.logit_divisor_key}"] if family.logit_divisor_key else []
    return ", ".join(words) or "plain"


if __name__ == "__main__":
    (HERE / "targets.md").write_text(targets_page(), encoding="utf-8")
