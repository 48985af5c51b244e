"""Above temperature 0: do answers with the draft have the distribution of the target alone?"""

from collections.abc import Sequence
from typing import Any

from eyas.engines.base import Prompt, Sampling
from eyas.engines.decoder_base import Decoder
from eyas.errors import ContractError
from eyas.evaluate.two_samples import compare_samples
from eyas.serving.results import Samples, ServingResults

# Answers are short: what a wrong acceptance rule changes shows in the first tokens.
_NUM_PROMPTS, _NUM_SAMPLES, _NUM_TOKENS = 8, 48, 3


def sample_answers(
    decoder: Decoder, prompts: Sequence[Prompt], concurrency: int, temperature: float, seed: int
) -> Samples:
    """Sample several short answers to each of the first prompts, each set with another seed."""
    chosen = prompts[:_NUM_PROMPTS]
    found: Samples = {prompt.prompt_id: [] for prompt in chosen}
    for number in range(_NUM_SAMPLES):
        # Of the target alone and with the draft other seeds: equal random numbers could hide a difference.
        sampling = Sampling(_NUM_TOKENS, temperature, seed + number)
        for name, answer in decoder.answer(chosen, concurrency, sampling).answers.items():
            found[name].append(tuple(answer.token_ids))
    return found


def compare_sampled(measured: ServingResults) -> list[dict[str, Any]]:
    """Compare each K's samples with those of the target alone, where both were taken."""
    rows = []
    for (k, temperature), samples in sorted(measured.sampled.items()):
        alone = measured.sampled.get((0, temperature))
        if k and alone is not None:
            result = compare_samples(samples, alone, _NUM_TOKENS)
            rows.append({"num_draft_tokens": k, "temperature": temperature, **vars(result)})
    return rows


def broken_by_sampling(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the contracts that sampled answers contradict."""
    return [
        f"sampling: at temperature {row['temperature']:g} answers with K = {row['num_draft_tokens']} have "
        f"another distribution than the target's (p = {row['p_value']:.1g} for {row['num_samples']} answers)"
        for row in rows
        if row["differs"]
    ]


def check_sampled(rows: Sequence[dict[str, Any]]) -> None:
    """Raises: ContractError where sampled answers have another distribution than the target's."""
    if broken := broken_by_sampling(rows):
        raise ContractError(broken[0], hint="evaluation/report.json says what the test could have found")
