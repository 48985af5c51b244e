"""Above temperature 0: do answers with the draft have the distribution of the target alone?"""

from collections.abc import Sequence
from typing import Any

from eyas.engines.base import Prompt, Sampling
from eyas.engines.decoder_base import Decoder
from eyas.evaluate.two_samples import NUM_SAMPLES, NUM_TOKENS, sampling_row
from eyas.serving.results import Samples, ServingResults

_NUM_PROMPTS = 8


def sample_answers(
    decoder: Decoder, prompts: Sequence[Prompt], concurrency: int, temperature: float, seed: int
) -> Samples:
    """Sample several short answers to each of the first prompts, each set with another seed."""
    chosen = prompts[:_NUM_PROMPTS]
    found: Samples = {prompt.prompt_id: [] for prompt in chosen}
    for number in range(NUM_SAMPLES):
        # Of the target alone and with the draft other seeds: equal random numbers could hide a difference.
        sampling = Sampling(NUM_TOKENS, temperature, seed + number)
        for name, answer in decoder.answer(chosen, concurrency, sampling).answers.items():
            found[name].append(tuple(answer.token_ids))
    return found


def compare_sampled(measured: ServingResults) -> list[dict[str, Any]]:
    """Compare each K's samples with those of the target alone, where both were taken."""
    rows = []
    for (k, temperature), samples in sorted(measured.sampled.items()):
        alone = measured.sampled.get((0, temperature))
        if k and alone is not None:
            rows.append(sampling_row(k, temperature, samples, alone))
    return rows
