"""A small real tokenizer with merges across word and line ends, and runs of prepare without a model."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from eyas.config.load import load_config
from eyas.data.prepared import SPLITS, read_manifest, read_samples
from eyas.data.sources import Drop
from eyas.stages.prepare import prepare
from eyas.stages.run_context import RunContext
from eyas.types import TokenizedSample

ROOT = Path(__file__).parents[2]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CORPUS = [
    "The answer is forty-two.\n\nThe answer is not known.\n  indented\n\n\nassistant\nuser\nsystem\n",
    "user asks, assistant answers: yes, no, one two three four five. Red. Blue. Green.",
    "<think>\nlet me think\n</think>\n\n<tool_call>get_weather</tool_call>",
] * 20


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of public inputs beside the checkout; tests that need it skip without it."""
    for parent in (ROOT.parent, ROOT.parent.parent):
        if (parent / "shared" / "cases").is_dir():
            return parent / "shared"
    pytest.skip("../shared is not there")


def make_tokenizer(template: str = CHATML) -> PreTrainedTokenizerFast:
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    special = [
        AddedToken(t, special=True, normalized=False) for t in ("<|pad|>", "<|im_start|>", "<|im_end|>")
    ]
    raw.train_from_iterator(
        _CORPUS,
        trainers.BpeTrainer(
            vocab_size=600,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|pad|>"
    )
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="session")
def smollm2() -> Any:
    """SmolLM2's own tokenizer, from the demo target where that was converted before."""
    from transformers import AutoTokenizer

    from eyas.targets.remote import cache_folder

    folders = sorted(cache_folder().glob("smollm2-135m-instruct-*"))
    if not folders:
        pytest.skip("the demo target has not been converted on this machine")
    return AutoTokenizer.from_pretrained(folders[-1])


@dataclass(frozen=True)
class Spec:
    """What prepare asks of a target."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer_fingerprint: str = "tokenizer"
    template_fingerprint: str = "template"
    fingerprint: str = "target"
    max_position_embeddings: int = 8192


class FakeContext(RunContext):
    """A run whose target is a tokenizer alone."""

    tokenizer: Any = None

    @cached_property
    def spec(self) -> Any:
        return Spec(len(self.tokenizer), (self.tokenizer.eos_token_id,))


@dataclass(frozen=True)
class Outcome:
    """What prepare left behind."""

    folder: Path
    manifest: dict[str, Any]
    samples: list[TokenizedSample]
    drops: list[Drop]

    def trained(self, tokenizer: Any) -> dict[str, list[str]]:
        """Return by sample id the texts of the spans that are trained."""
        return {s.sample_id: spans(s, tokenizer) for s in self.samples}

    def reasons(self) -> dict[str, str]:
        return {d.row_id: d.reason for d in self.drops}


def spans(sample: TokenizedSample, tokenizer: Any) -> list[str]:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], sample.loss_mask, [False]])))
    return [
        str(tokenizer.decode(sample.input_ids[a:b], skip_special_tokens=False))
        for a, b in edges.reshape(-1, 2)
    ]


Prepare = Callable[..., Outcome]


@pytest.fixture
def run_prepare(tmp_path: Path) -> Prepare:
    """Run the stage on rows or files: ``run_prepare(tokenizer, rows, "data.max_length=64")``."""

    def run(tokenizer: Any, source: Sequence[Any] | Path | str, *settings: str) -> Outcome:
        if not isinstance(source, str | Path):
            path = tmp_path / "rows.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in source), encoding="utf-8")
            source = path
        base = (
            f"run_dir={tmp_path / 'run'}",
            "target.model=none",
            f"data.sources={json.dumps([str(source)])}",
            "regenerate.enabled=false",
            "data.max_drop_share=1",
        )
        context = FakeContext(load_config(None, (*base, *settings)), frozenset(["prepare"]))
        context.tokenizer = tokenizer
        prepare(context)
        return outcome_of(context.folder("prepare"))

    return run


def outcome_of(folder: Path) -> Outcome:
    lines = (folder / "drops.jsonl").read_text().splitlines()
    samples = [s for split in SPLITS for s in read_samples(folder, split)]
    return Outcome(folder, read_manifest(folder), samples, [Drop(**json.loads(line)) for line in lines])
