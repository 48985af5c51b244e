"""Which samples an engine can compute, and which of them it is probed with; nothing is loaded for it."""

from collections.abc import Callable, Iterable, Sequence

from eyas.capture.capture_run import CaptureRun
from eyas.data.prepared import read_samples
from eyas.errors import UserError
from eyas.types import TargetSpec, TokenizedSample

# Samples kept of each split to make the probe's from.
_NUM_EXAMPLES = 50


def make_sample_check(spec: TargetSpec, max_length: int) -> Callable[[TokenizedSample], None]:
    """Return what refuses, before anything is loaded, a sample that no engine can compute."""
    limit, name = min(
        (max_length, "data.max_length"), (spec.max_position_embeddings, "the target's positions")
    )

    def check(sample: TokenizedSample) -> None:
        if sample.input_ids.max() >= spec.vocab_size:
            raise UserError(
                f"sample {sample.sample_id} has token id {sample.input_ids.max()}, "
                f"the target only {spec.vocab_size}",
                hint="the ids are another tokenizer's: prepare the data again for this target",
            )
        if len(sample) > limit:
            raise UserError(
                f"sample {sample.sample_id} has {len(sample)} tokens, more than {name} ({limit})",
                hint="prepare the data again with a smaller data.max_length"
                if name != "data.max_length"
                else f"set data.max_length={len(sample)} (--max-seq-len)",
            )

    return check


def scan(
    samples: Iterable[TokenizedSample], check: Callable[[TokenizedSample], None], num_samples: int
) -> tuple[list[int], list[TokenizedSample]]:
    """Check every sample; return their lengths, and some with the longest among them, to probe with."""
    lengths: list[int] = []
    examples: list[TokenizedSample] = []
    longest: TokenizedSample | None = None
    for sample in samples:
        check(sample)
        if len(lengths) % max(1, num_samples // _NUM_EXAMPLES) == 0:
            examples.append(sample)
        lengths.append(len(sample))
        if longest is None or len(sample) > len(longest):
            longest = sample
    return lengths, examples + ([longest] if longest is not None else [])


def examples_of(samples: Sequence[TokenizedSample]) -> list[TokenizedSample]:
    """Return some of ``samples`` to probe with, the longest among them."""
    longest = [max(samples, key=len)] if samples else []
    return [*samples[:: max(1, len(samples) // _NUM_EXAMPLES)], *longest]


def train_samples(run: CaptureRun) -> list[TokenizedSample]:
    """Read the train split. Raises: UserError for a sample that no engine can compute."""
    check, samples = make_sample_check(run.spec, run.max_length), []
    for sample in read_samples(run.samples_folder, "train"):
        check(sample)
        samples.append(sample)
    return samples
