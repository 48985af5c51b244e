"""Small random training cases: a draft, a teacher, packed documents with random masks."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from eyas.drafters.common.heads_and_rope import latent_head_dim
from eyas.drafters.eagle3.config import DraftConfig
from eyas.drafters.eagle3.model import Eagle3Draft
from eyas.targets.teacher import TeacherHead
from eyas.types import HiddenStates, TokenizedSample

EPS, THETA = 1e-6, 10000.0


@dataclass
class Case:
    """``aux`` [N, A, D] and ``last`` [N, D] are the full streams that ``states`` were selected from."""

    draft: Eagle3Draft
    teacher: TeacherHead
    target_ids: torch.Tensor
    samples: list[TokenizedSample]
    aux: torch.Tensor
    last: torch.Tensor

    @property
    def states(self) -> list[HiddenStates]:
        ends = np.cumsum([len(s) for s in self.samples])
        return [
            HiddenStates.select(s, self.aux[end - len(s) : end], self.last[end - len(s) : end])
            for s, end in zip(self.samples, ends, strict=True)
        ]


def random_mask(length: int, share: float, generator: np.random.Generator) -> np.ndarray:
    """Runs of assistant tokens of random lengths, about ``share`` of the document; never without a row."""
    mask = np.zeros(length, dtype=bool)
    while mask.mean() < share:
        start = int(generator.integers(0, length - 1))
        mask[start : start + int(generator.integers(2, max(3, length // 2)))] = True
    mask[-2:] = True
    return mask


def random_sample(
    name: str, length: int, share: float, vocab_size: int, generator: np.random.Generator
) -> TokenizedSample:
    ids = generator.integers(0, vocab_size, length).astype(np.int32)
    mask = random_mask(length, share, generator)
    return TokenizedSample(name, ids, mask, cut=bool(generator.integers(2)))


def make_case(
    seed: int,
    lengths: tuple[int, ...] = (19, 2, 33, 11),
    share: float = 0.6,
    *,
    width: int = 32,
    target_width: int | None = None,  # another one: the draft has its own embedding
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    mlp: int = 48,
    target_vocab: int = 61,
    draft_vocab: int = 29,
    num_aux: int = 3,
    fc_norm: bool = False,
    norm_output: bool = False,
    num_layers: int = 1,
    latent: Mapping[str, int] | None = None,
    norm_before_residual: bool = False,
    norm_before_fc: bool = False,
    window: int | None = None,
) -> Case:
    generator = np.random.default_rng(seed)
    torch_generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=torch_generator)

    target_width = target_width or width
    config = DraftConfig(
        hidden_size=width,
        target_hidden_size=target_width,
        num_aux_layers=num_aux,
        vocab_size=draft_vocab,
        target_vocab_size=target_vocab,
        intermediate_size=mlp,
        num_attention_heads=heads,
        num_key_value_heads=heads if latent else kv_heads,
        head_dim=latent_head_dim(latent) if latent else head_dim,
        rms_norm_eps=EPS,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        fc_norm=fc_norm,
        norm_output=norm_output,
        num_layers=num_layers,
        sliding_window=window,
        latent_attention=latent,
        norm_before_residual=norm_before_residual,
        norm_before_fc=norm_before_fc,
    )
    draft = Eagle3Draft(config)
    with torch.no_grad():
        for p in draft.parameters():
            p.copy_(normal(*p.shape) * p.shape[-1] ** -0.5 if p.ndim == 2 else 1 + 0.2 * normal(*p.shape))
    teacher = TeacherHead(
        norm_weight=1 + 0.2 * normal(target_width),
        head=normal(target_vocab, target_width) * 2 * target_width**-0.5,
        embedding=draft.embed_tokens.weight.detach()
        if width == target_width
        else normal(target_vocab, target_width),
        norm_kind="rms",
        norm_eps=EPS,
        logit_softcap=None,
        logit_scale=1.0,
    )
    ids = np.sort(generator.choice(target_vocab, draft_vocab, replace=False))
    samples = [random_sample(f"s{i}", n, share, target_vocab, generator) for i, n in enumerate(lengths)]
    num_tokens = sum(lengths)
    return Case(
        draft,
        teacher,
        torch.from_numpy(ids),
        samples,
        normal(num_tokens, num_aux, target_width),
        normal(num_tokens, target_width),
    )
