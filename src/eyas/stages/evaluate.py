"""evaluate: speculative decoding with the exported draft, beside the target alone and the prediction."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from eyas.errors import ContractError, UserError
from eyas.evaluate.acceptance import predict_acceptance
from eyas.evaluate.decode import Decoded, DraftChain, decode_plain, decode_speculative
from eyas.evaluate.lossless import NEAR_TIE, FirstDifference, first_difference
from eyas.export.vllm import load_export
from eyas.files import fingerprint, write_json
from eyas.progress import Progress, say
from eyas.stages.context import RunContext, begin, finish
from eyas.stages.examples import examples_of
from eyas.store.shards import ShardStore
from eyas.targets.teacher import read_teacher
from eyas.train.metrics import Acceptance
from eyas.types import TokenizedSample


def evaluate(context: RunContext) -> None:
    """Decode held-out prompts with and without the draft; write report.json and check the outputs."""
    settings = context.config.evaluate
    inputs = {
        "draft": context.output_of("export"),
        "states": context.output_of("extract"),
        "evaluate": settings.model_dump(mode="json"),
    }
    if not begin(context, "evaluate", inputs):
        return
    teacher = read_teacher(context.target_folder, context.spec).to(context.device, torch.float32)
    draft, target_ids, config = load_export(context.folder("export"), teacher.embedding)
    if config["eyas"]["target_fingerprint"] != context.spec.fingerprint:
        raise ContractError("the exported draft is for another target", hint="eyas export --fresh")
    draft.to(context.device)
    target_ids = target_ids.to(context.device)
    states = ShardStore(context.folder("extract") / "held_out")
    indices = _choose(states, settings.num_prompts, settings.max_new_tokens, context.spec.eos_token_ids)
    engine = context.make_engine("transformers")
    prompts: list[tuple[str, list[int]]] = []
    plain: list[Decoded] = []
    drafted: list[Decoded] = []
    differences: list[FirstDifference] = []
    with Progress("evaluate", len(indices), "prompts") as progress:
        for index in indices:
            sample = states.sample(index)
            prompt = sample.input_ids[: sample.loss_mask.argmax()].tolist()
            prompts.append((sample.sample_id, prompt))
            limit, eos = settings.max_new_tokens, context.spec.eos_token_ids
            plain.append(decode_plain(engine.session(), prompt, limit, eos))
            chain = DraftChain(draft, target_ids)
            drafted.append(
                decode_speculative(engine.session(), chain, prompt, settings.num_draft_tokens, limit, eos)
            )
            a, b = plain[-1], drafted[-1]
            difference = first_difference(sample.sample_id, a.token_ids, b.token_ids, a.gaps)
            if difference:
                differences.append(difference)
            progress.advance(1, f"acceptance length {_total(drafted, settings.num_draft_tokens).length:.2f}")
    engine.close()
    predicted = predict_acceptance(
        draft, teacher, target_ids, states, indices, settings.num_draft_tokens, settings.max_new_tokens
    )
    report = _report(context, prompts, plain, drafted, differences, predicted)
    write_json(context.folder("evaluate") / "report.json", report)
    _check_lossless(differences, context.spec.dtype)
    finish(context, "evaluate", fingerprint(report["acceptance"]), report=report)
    say(f"evaluate: {report['identical']} of {len(indices)} answers are the target's own, token for token")


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
    length = int(np.append(~sample.loss_mask[start:], True).argmax())
    if sample.input_ids[start + length - 1] in eos_token_ids:
        return float("inf")
    # The last state of an answer cut at the sample's end still tells the token after it. One cut by the
    # length limit in an earlier turn is followed by the template's own end of turn, and tells nothing.
    return length + (sample.cut and start + length == len(sample))


def _total(decoded: Sequence[Decoded], num_draft_tokens: int) -> Acceptance:
    total = Acceptance.empty(num_draft_tokens)
    for one in decoded:
        assert one.acceptance is not None
        total += one.acceptance
    return total


def _report(
    context: RunContext,
    prompts: Sequence[tuple[str, list[int]]],
    plain: Sequence[Decoded],
    drafted: Sequence[Decoded],
    differences: Sequence[FirstDifference],
    predicted: Acceptance,
) -> dict[str, Any]:
    settings = context.config.evaluate
    acceptance = _total(drafted, settings.num_draft_tokens)
    return {
        "num_draft_tokens": settings.num_draft_tokens,
        "num_prompts": len(plain),
        "max_new_tokens": settings.max_new_tokens,
        "temperature": 0.0,
        "dtype": context.spec.dtype,
        "device": context.device,
        "acceptance": acceptance.length,
        "acceptance_rates": acceptance.rates,
        "predicted": predicted.length,
        "predicted_rates": predicted.rates,
        "identical": len(plain) - len(differences),
        "differences": [d.__dict__ for d in differences],
        "examples": examples_of(context.tokenizer, prompts, drafted),
        "plain_tokens_per_s": _rate(plain),
        "drafted_tokens_per_s": _rate(drafted),
    }


def _rate(decoded: Sequence[Decoded]) -> float:
    return sum(len(d.token_ids) for d in decoded) / sum(d.seconds for d in decoded)


def _check_lossless(differences: Sequence[FirstDifference], dtype: str) -> None:
    """Raises: ContractError for a difference that is no near-tie of the target's own top two tokens."""
    for d in differences:
        if d.gap > NEAR_TIE[dtype]:
            raise ContractError(
                f"the draft changed the answer to {d.prompt_id}: token {d.position} is {d.found} instead of "
                f"{d.expected}, which leads by {d.gap:.3g} logits",
                hint="this must never happen; please report it with the run folder's report.json",
            )
