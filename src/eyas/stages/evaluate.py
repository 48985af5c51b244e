"""evaluate: speculative decoding with the exported draft, beside the target alone and the prediction."""

import csv
import gc
from collections.abc import Collection, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eyas import registry
from eyas.data.benchmarks import benchmark_fingerprint
from eyas.drafters.base import Draft, Drafter
from eyas.drafters.common.acceptance import Acceptance
from eyas.engines.base import Prompt
from eyas.errors import ContractError, UserError
from eyas.evaluate.acceptance import predict_acceptance
from eyas.evaluate.decode import Decoded, decode_plain, decode_speculative
from eyas.evaluate.lossless import first_difference, is_near_tie
from eyas.export.native import load_export
from eyas.export.read import kind_of
from eyas.files import atomic_file, fingerprint, write_json
from eyas.progress import Progress, say
from eyas.report.examples import examples_of
from eyas.report.serving_section import identical_of
from eyas.serving.agreement import HeldOut, Here
from eyas.serving.benchmark import measure_served, served_figures
from eyas.serving.results import SO_FAR
from eyas.stages.export import is_whole
from eyas.stages.run_context import RunContext, begin, finish
from eyas.store.aux_subset import with_layers
from eyas.store.shards import ShardStore
from eyas.targets.teacher import read_teacher
from eyas.types import TokenizedSample


def evaluate(context: RunContext) -> None:
    """Decode held-out prompts with and without the draft; write report.json and check the outputs."""
    settings = context.config.evaluate
    inputs = {
        "draft": context.output_of("export"),
        "states": context.output_of("extract"),
        "evaluate": settings.model_dump(mode="json"),
    }
    if settings.benchmarks:
        inputs["benchmarks"] = {name: benchmark_fingerprint(name) for name in settings.benchmarks}
    if not begin(context, "evaluate", inputs):
        return
    if not is_whole(context):
        raise ContractError(
            f"{context.folder('export')} is not what was exported and verified",
            hint="run the same eyas export again; it writes the folder anew",
        )
    teacher = read_teacher(context.target_folder, context.spec).to(context.device, torch.float32)
    draft, target_ids, config = load_export(context.folder("export"), teacher.embedding, teacher.head)
    if config["eyas"]["target_fingerprint"] != context.draft_spec.fingerprint:
        raise ContractError("the exported draft is for another target", hint="eyas export --fresh")
    draft.to(context.device)
    target_ids = target_ids.to(context.device)
    states = context.store("held_out")
    indices = _choose(states, settings.num_prompts, settings.max_new_tokens, context.spec.eos_token_ids)
    prompts = [_prompt(states.sample(index)) for index in indices]
    drafter: Drafter = registry.drafter(kind_of(context.folder("export"), config))
    here = _decode(context, drafter, draft, target_ids, prompts) if settings.in_process else None
    names = [prompt.prompt_id for prompt in prompts]
    predicted = predict_acceptance(
        drafter,
        draft,
        teacher,
        target_ids,
        with_layers(states, context.draft_spec.aux_layer_ids),
        indices,
        settings.num_draft_tokens,
        settings.max_new_tokens,
    )
    stored = [_first_answer(states.sample(index))[: settings.max_new_tokens] for index in indices]
    held_out = HeldOut(
        prompts,
        dict(zip(names, stored, strict=True)),
        dict(zip(names, predicted, strict=True)),
        here,
    )
    served = None
    if settings.engine == "vllm" or settings.endpoint:
        del teacher, draft, target_ids
        _free_memory()  # the engine wants the device to itself
        served = measure_served(context, held_out)
    report = _report(context, held_out, served)
    if here is not None:
        pairs = [(list(p.token_ids), here.drafted[p.prompt_id]) for p in prompts]
        report["examples"] = examples_of(context.tokenizer, pairs)
    folder = context.folder("evaluate")
    write_json(folder / "report.json", report)
    if served is not None:
        _write_csv(folder / "serving.csv", served["points"])
        _write_csv(folder / "categories.csv", served["categories"])
        (folder / SO_FAR).unlink(missing_ok=True)  # also where a check below fails: it is measured anew then
    _check_lossless(report["differences"], context.spec.dtype)
    _check_agreement(served, context.spec.dtype)
    finish(context, "evaluate", fingerprint(report["acceptance"]), report=report)
    if here is not None:
        others = "; the others part at near-ties" if here.differences else ""
        say(f"evaluate: {identical_of(report)} answers are the target's own, token for token{others}")
    if served is not None:
        say(f"evaluate: {served['recommendation']}")


def _free_memory() -> None:
    """Give back what this process holds of a device beyond what it still uses."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _prompt(sample: TokenizedSample) -> Prompt:
    return Prompt(sample.sample_id, tuple(sample.input_ids[: sample.loss_mask.argmax()].tolist()))


def _decode(
    context: RunContext,
    drafter: Drafter,
    draft: Draft,
    target_ids: torch.Tensor,
    prompts: Sequence[Prompt],
) -> Here:
    """Decode every prompt with and without the draft."""
    settings, eos = context.config.evaluate, context.spec.eos_token_ids
    limit, k = settings.max_new_tokens, settings.num_draft_tokens
    engine = context.make_engine("transformers", context.draft_spec)
    here, acceptance = Here({}, {}, []), Acceptance.empty(k)
    with closing(engine), Progress("evaluate", len(prompts), "prompts") as progress:
        for prompt in prompts:
            ids = list(prompt.token_ids)
            plain = decode_plain(engine.session(), ids, limit, eos)
            proposer = drafter.proposer(draft, target_ids)
            drafted = decode_speculative(engine.session(), proposer, ids, k, limit, eos)
            here.plain[prompt.prompt_id], here.drafted[prompt.prompt_id] = plain, drafted
            difference = first_difference(
                prompt.prompt_id, plain.token_ids, drafted.token_ids, plain.likeliest
            )
            if difference:
                here.differences.append(difference)
            assert drafted.acceptance is not None
            acceptance += drafted.acceptance
            progress.advance(1, f"acceptance length {acceptance.length:.2f}")
    return here


def _choose(
    states: ShardStore, num_prompts: int, max_new_tokens: int, eos_token_ids: Sequence[int]
) -> list[int]:
    """Take prompts evenly over the split; an answer must be known as far as it will be decoded.

    Raises: UserError when no answer is.
    """
    known = [
        i for i in range(len(states.lengths)) if _num_known(states.sample(i), eos_token_ids) >= max_new_tokens
    ]
    if not known:
        raise UserError(
            f"every held-out answer is cut before evaluate.max_new_tokens={max_new_tokens} tokens",
            hint="lower it, or raise regenerate.max_new_tokens and data.max_length",
        )
    step = max(1, len(known) // num_prompts)
    return known[::step][:num_prompts]


def _num_known(sample: TokenizedSample, eos_token_ids: Sequence[int]) -> float:
    """Return how many tokens of the first answer the stored states tell; a finished answer has no more."""
    start = int(sample.loss_mask.argmax())
    answer = _first_answer(sample)
    if answer[-1] in eos_token_ids:
        return float("inf")
    # The last state of an answer cut at the sample's end still tells the token after it. One cut by the
    # length limit in an earlier turn is followed by the template's own end of turn, and tells nothing.
    return len(answer) + (sample.cut and start + len(answer) == len(sample))


def _first_answer(sample: TokenizedSample) -> tuple[int, ...]:
    """Return the tokens of the first supervised run."""
    start = int(sample.loss_mask.argmax())
    length = int(np.append(~sample.loss_mask[start:], True).argmax())
    return tuple(sample.input_ids[start : start + length].tolist())


def _report(context: RunContext, held_out: HeldOut, served: Any) -> dict[str, Any]:
    """Put the figures together; what was not decoded in this process is the engine's own."""
    settings, here = context.config.evaluate, held_out.here
    num_prompts, predicted = len(held_out.prompts), held_out.total_predicted()
    report: dict[str, Any] = {
        "num_draft_tokens": settings.num_draft_tokens,
        "num_prompts": num_prompts,
        "max_new_tokens": settings.max_new_tokens,
        "temperature": 0.0,
        "dtype": context.spec.dtype,
        "device": context.device,
        "predicted": predicted.length,
        "predicted_rates": predicted.rates,
        "served": served,
    }
    differences = [vars(d) for d in here.differences] if here else []
    if served is not None:
        differences += served["lossless"]["differences"]
    report["differences"] = differences
    acceptance = held_out.total_decoded()
    if here is not None and acceptance is not None:
        return report | {
            "acceptance": acceptance.length,
            "acceptance_rates": acceptance.rates,
            "identical": num_prompts - len(here.differences),
            "plain_tokens_per_s": _rate(here.plain.values()),
            "drafted_tokens_per_s": _rate(here.drafted.values()),
        }
    return report | served_figures(served, settings.num_draft_tokens)


def _rate(decoded: Collection[Decoded]) -> float:
    return sum(len(d.token_ids) for d in decoded) / sum(d.seconds for d in decoded)


def _check_lossless(differences: Sequence[dict[str, Any]], dtype: str) -> None:
    """Raises: ContractError for a difference of tokens that are not both near the target's likeliest."""
    for d in differences:
        if not is_near_tie(dtype, d["top"], d["gap"]):
            expected, found = ("its end" if d[key] == -1 else d[key] for key in ("expected", "found"))
            far = "not" if d["gap"] is None else f"{d['gap']:.3g} logits from being"
            raise ContractError(
                f"the draft changed the answer to {d['prompt_id']}: token {d['position']} is {found} "
                f"instead of {expected}, and one of the two is {far} the target's likeliest there",
                hint="this must never happen; please report it with the run folder's report.json",
            )


def _check_agreement(served: Any, dtype: str) -> None:
    """Say which contract is broken; in fp32, where text cannot differ by rounding, that ends the stage.

    Raises: ContractError.
    """
    broken = served["agreement"]["broken"] if served is not None else []
    if broken and dtype == "float32":
        raise ContractError(broken[0], hint="evaluation/report.json has the figures; see docs/serving.md")
    for line in broken:
        say(f"evaluate: warning: {line}")


def _write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write a table; bounds and rates become one column each."""
    flat = [_flat(row) for row in rows]
    names = list(dict.fromkeys(name for row in flat for name in row))
    with atomic_file(path) as beside, beside.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(flat)


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in row.items():
        if name == "acceptance_length":
            out["acceptance_length_low"], out["acceptance_length_high"] = value or (None, None)
        elif name == "acceptance_rates":
            out |= {f"acceptance_rate_{k}": rate for k, rate in enumerate(value or (), 1)}
        else:
            out[name] = value
    return out
