"""A public fake target for tests: small, instant, deterministic, and honest about its own logits."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from eyas.engines.base import ProbeOutput, Prompt, Sampling
from eyas.types import Completion, Failure, HiddenStates, TargetSpec, TokenizedSample


class FakeEngine:
    """States are a fixed function of (token, position, layer); answers repeat the prompt's last token.

    ``fails`` names samples that come back as failures, as a real engine's would.
    """

    streams = False

    def __init__(
        self, folder: Path | None, spec: TargetSpec, *, fails: frozenset[str] = frozenset(), **ignored: object
    ) -> None:
        self.spec = spec
        self.fails = fails
        generator = torch.Generator().manual_seed(0)
        self.table = torch.randn(spec.vocab_size, spec.hidden_size, generator=generator)

    def capture(self, samples: Iterable[TokenizedSample]) -> Iterator[HiddenStates | Failure]:
        dtype = getattr(torch, self.spec.dtype)
        for sample in samples:
            if sample.sample_id in self.fails:
                yield Failure(sample.sample_id, "the fake engine was told to fail")
                continue
            tokens = self.table[torch.from_numpy(sample.input_ids).long()]  # (T, D)
            positions = torch.arange(len(sample))[:, None] / 100
            layers = (*self.spec.aux_layer_ids, self.spec.num_layers)
            states = torch.stack([tokens * (layer + 1) + positions for layer in layers], dim=1).to(dtype)
            yield HiddenStates.select(sample, states[:, :-1], states[:, -1])

    def probe_outputs(self, samples: Iterable[TokenizedSample]) -> list[ProbeOutput | Failure]:
        items = self.capture(samples)
        return [i if isinstance(i, Failure) else ProbeOutput(i, None, 0.0) for i in items]

    def generate(self, prompts: Iterable[Prompt], sampling: Sampling) -> Iterator[Completion | Failure]:
        for prompt in prompts:
            if prompt.prompt_id in self.fails:
                yield Failure(prompt.prompt_id, "the fake engine was told to fail")
                continue
            answer = (prompt.token_ids[-1],) * (sampling.max_new_tokens - 1)
            yield Completion(prompt.prompt_id, (*answer, self.spec.eos_token_ids[0]), "stop")

    def close(self) -> None:
        pass
