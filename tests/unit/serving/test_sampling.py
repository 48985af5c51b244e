"""Sampled answers with the draft are compared with the target's, by distribution."""

import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from eyas.engines.base import Prompt, Sampling
from eyas.engines.decoder_base import Served
from eyas.engines.spec_decode_metrics import SpecCounters
from eyas.evaluate.two_samples import broken_by_sampling
from eyas.report.serving_section import served_rows
from eyas.serving.results import ServingResults
from eyas.serving.sampling import compare_sampled, sample_answers
from eyas.types import Completion

PROMPTS = [Prompt(f"p{i}", (1, i)) for i in range(12)]


class Dice:
    """Answers with independent tokens of the given weights."""

    def __init__(self, weights: Sequence[float]) -> None:
        self.weights = weights
        self.seeds: set[int] = set()

    def answer(self, prompts: Sequence[Prompt], concurrency: int, sampling: Sampling) -> Served:
        self.seeds.add(sampling.seed)
        answers = {}
        for prompt in prompts:
            rng = np.random.default_rng([sampling.seed, zlib.crc32(prompt.prompt_id.encode())])
            tokens = rng.choice(len(self.weights), sampling.max_new_tokens, p=self.weights)
            answers[prompt.prompt_id] = Completion(prompt.prompt_id, tuple(map(int, tokens)), "length")
        return Served(answers, seconds=1.0)

    def counters(self) -> SpecCounters:
        raise AssertionError("nothing is counted")

    def close(self) -> None:
        pass


def sampled_with(drafted: Sequence[float]) -> ServingResults:
    alone = sample_answers(Dice([0.5, 0.3, 0.2]), PROMPTS, 4, 0.7, seed=1)
    with_draft = sample_answers(Dice(drafted), PROMPTS, 4, 0.7, seed=2_000_001)
    return ServingResults([], sampled={(0, 0.7): alone, (2, 0.7): with_draft})


def test_answers_of_the_targets_distribution_break_nothing() -> None:
    (row,) = compare_sampled(sampled_with([0.5, 0.3, 0.2]))
    assert (row["num_draft_tokens"], row["temperature"], row["num_samples"]) == (2, 0.7, 8 * 48)
    assert not row["differs"]
    assert broken_by_sampling([row]) == []


def test_another_distribution_is_named_with_its_temperature() -> None:
    (broken,) = broken_by_sampling(compare_sampled(sampled_with([0.2, 0.3, 0.5])))
    assert broken.startswith("sampling: at temperature 0.7 answers with K = 2 have another distribution")


def test_each_answer_to_a_prompt_is_sampled_with_another_seed() -> None:
    decoder = Dice([0.5, 0.5])
    samples = sample_answers(decoder, PROMPTS, 4, 1.0, seed=3)
    assert len(decoder.seeds) == len(samples["p0"]) == 48
    assert len(samples) == 8
    assert len(set(samples["p0"])) > 1


def test_without_the_target_alone_nothing_is_compared() -> None:
    measured = sampled_with([0.5, 0.3, 0.2])
    del measured.sampled[0, 0.7]
    assert compare_sampled(measured) == []


def test_samples_survive_an_interruption(tmp_path: Path) -> None:
    measured, path = sampled_with([0.5, 0.3, 0.2]), tmp_path / "so-far.json"
    measured.save(path, {})
    again = ServingResults.load(path, {})
    assert again is not None
    assert again.sampled == measured.sampled


def test_the_report_says_what_the_test_could_have_found() -> None:
    rounding = {"share_of_large_gaps": 0.25}
    served = {
        "engine": "vllm 0.32.0",
        "num_prompts": 8,
        "left_out": 0,
        "points": [],
        "categories": [],
        "deployment": {"prefix caching": "off", "key/value cache": "fp8"},
        "lossless": {"compared": 8, "differences": [1, 2, 3, 4], "rounding": rounding},
        "sampled": compare_sampled(sampled_with([0.5, 0.3, 0.2])),
        "agreement": {"broken": ["x"]},
        "recommendation": "none",
    }
    rows = dict(served_rows(served))
    assert rows["lossless"] == "8 answers compared, 4 near-ties, 25% of them with a gap above 0.125 logits"
    assert "the target's distribution" in rows["sampling"]
    assert "nine times in ten" in rows["sampling"]
    assert rows["measured with"] == "prefix caching off, key/value cache fp8"
