"""Small random cases for block drafts: a draft, a teacher, packed documents, and their plan."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from block_reference import Kind
from eyas.drafters.common.batch import PackedBatch
from eyas.drafters.common.block.anchors import BlockPlan, plan_blocks
from eyas.drafters.common.block.judge import BlockJudge
from eyas.drafters.common.block.loss import LossMix
from eyas.drafters.common.block.model import BlockDraft
from eyas.drafters.common.block.objective import BlockObjective
from eyas.drafters.dflash.config import DFlashConfig
from eyas.drafters.dflash.model import DFlashDraft
from eyas.drafters.dspark.config import DSparkConfig
from eyas.drafters.dspark.model import DSparkDraft
from eyas.drafters.dspark.objective import ConfidenceLoss
from eyas.targets.teacher import TeacherHead
from eyas.types import TokenizedSample
from train_cases import EPS, THETA, random_sample

DFLASH_LOSSES: Mapping[str, LossMix] = {
    "d-pace": LossMix(ce=1.0, dpace_alpha=0.5),
    "ce": LossMix(ce=1.0, gamma=4.0),
    "kl": LossMix(kl=1.0, gamma=7.0),
}
DSPARK_LOSS = LossMix(ce=0.1, l1=0.9, gamma=4.0)
CONFIDENCE_WEIGHT = 1.0
CPU = torch.device("cpu")


@dataclass
class BlockCase:
    """``aux`` [N, A, D] and ``last`` [N, D] are the full streams."""

    draft: BlockDraft
    teacher: TeacherHead
    target_ids: torch.Tensor
    samples: list[TokenizedSample]
    aux: torch.Tensor
    last: torch.Tensor
    plan: BlockPlan
    mix: LossMix

    @property
    def batch(self) -> Any:
        lengths = torch.tensor([len(s) for s in self.samples])
        documents = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        starts = torch.cumsum(lengths, 0) - lengths
        supervised = torch.from_numpy(np.concatenate([s.supervised for s in self.samples]))
        return PackedBatch(
            sample_ids=tuple(s.sample_id for s in self.samples),
            tokens=torch.from_numpy(np.concatenate([s.input_ids for s in self.samples])).long(),
            documents=documents,
            positions=torch.arange(len(documents)) - starts[documents],
            aux=self.aux,
            last=self.last[supervised],
            plan=self.plan,
        )

    @property
    def anchors(self) -> list[tuple[int, int]]:
        """The plan's anchors as (document, position in it)."""
        batch = self.batch
        places = self.plan.anchors
        return list(zip(batch.documents[places].tolist(), batch.positions[places].tolist(), strict=True))

    @property
    def kind(self) -> Kind:
        config = self.draft.config
        return Kind(
            first_slot=config.first_slot,
            size=config.block_size,
            mask_token=config.mask_token_id,
            causal=config.causal,
            window=config.sliding_window,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            eps=EPS,
            theta=THETA,
            ce=self.mix.ce,
            kl=self.mix.kl,
            l1=self.mix.l1,
            gamma=self.mix.gamma,
            alpha=self.mix.dpace_alpha,
            scale=config.logit_scale,
            confidence=CONFIDENCE_WEIGHT if isinstance(self.draft, DSparkDraft) else 0.0,
        )

    @property
    def further(self) -> ConfidenceLoss | None:
        is_dspark = isinstance(self.draft, DSparkDraft)
        return ConfidenceLoss(CONFIDENCE_WEIGHT, self.mix.gamma) if is_dspark else None

    def objective(self, path: type[BlockObjective] = BlockObjective, **named: Any) -> Any:
        """Return an objective of the kind, the plain one unless ``path`` is another."""
        judge = BlockJudge(self.teacher, self.target_ids)
        return path(self.draft, judge, self.mix, torch.float32, CPU, self.further, **named)


def make_block_case(
    name: str = "dflash",
    seed: int = 0,
    lengths: tuple[int, ...] = (19, 5, 33, 11),
    *,
    share: float = 0.6,
    loss: str = "d-pace",
    size: int = 5,
    causal: bool = True,
    window: int | None = 9,
    num_anchors: int = 6,
    width: int = 32,
    target_vocab: int = 61,
    draft_vocab: int = 61,
    num_aux: int = 3,
    num_layers: int = 2,
    head_dim: int = 8,
    heads: int = 4,
    kv_heads: int = 2,
    mlp: int = 48,
    rank: int = 6,
    logit_scale: float = 1.0,
    rope: Mapping[str, Any] | None = None,
) -> BlockCase:
    """Return a case of a ``dflash`` or ``dspark`` draft with weights that are all noise."""
    generator = np.random.default_rng(seed)
    torch_generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=torch_generator)

    shape: dict[str, Any] = {
        "hidden_size": width,
        "num_aux_layers": num_aux,
        "vocab_size": draft_vocab,
        "target_vocab_size": target_vocab,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": EPS,
        "max_position_embeddings": 4096,
        "rope_parameters": rope or {"rope_type": "default", "rope_theta": THETA},
        "num_layers": num_layers,
        "block_size": size,
        "mask_token_id": target_vocab - 2,
        "causal": causal,
        "sliding_window": window,
        "logit_scale": logit_scale,
    }
    draft: BlockDraft
    if name == "dflash":
        draft = DFlashDraft(DFlashConfig(**shape))
    else:
        draft = DSparkDraft(DSparkConfig(**shape, markov_rank=rank))
    with torch.no_grad():
        for p in draft.parameters():
            p.copy_(normal(*p.shape) * p.shape[-1] ** -0.5 if p.ndim == 2 else 1 + 0.2 * normal(*p.shape))
    teacher = TeacherHead(
        norm_weight=1 + 0.2 * normal(width),
        head=normal(target_vocab, width) * 2 * width**-0.5,
        embedding=normal(target_vocab, width),
        norm_kind="rms",
        norm_eps=EPS,
        logit_softcap=None,
        logit_scale=logit_scale,
    )
    ids = torch.from_numpy(np.sort(generator.choice(target_vocab, draft_vocab, replace=False)))
    draft.share(teacher.embedding, teacher.head[ids])
    samples = [random_sample(f"s{i}", n, share, target_vocab, generator) for i, n in enumerate(lengths)]
    supervised = torch.from_numpy(np.concatenate([s.supervised for s in samples]))
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    plan = plan_blocks(supervised, documents, draft.config.num_predictions, num_anchors, draw=seed)
    return BlockCase(
        draft,
        teacher,
        ids,
        samples,
        normal(sum(lengths), num_aux, width),
        normal(sum(lengths), width),
        plan,
        DSPARK_LOSS if name == "dspark" and loss == "d-pace" else DFLASH_LOSSES[loss],
    )


def with_config(case: BlockCase, **changes: Any) -> BlockDraft:
    """Return the case's draft with another configuration and the same weights."""
    draft = type(case.draft)(dataclasses.replace(case.draft.config, **changes))
    draft.load_state_dict(case.draft.state_dict())
    return draft
