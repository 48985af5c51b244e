"""Reads toys."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from eyas.drafters.common.stored import StoredDraft, check_tensors, target_ids_of
from toy_drafter.config import ToyConfig
from toy_drafter.model import ToyDraft


def recognises(config: Mapping[str, Any]) -> bool:
    return config.get("architectures") == ["ToyDraftModel"]


def check(folder: Path, config: Mapping[str, Any]) -> None:
    pass


def read(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> StoredDraft:
    shape = ToyConfig(**config["toy"])
    d2t = tensors.pop("d2t", None)
    tensors.pop("t2d", None)
    embedding = tensors.pop("embed_tokens.weight", None)
    check_tensors(folder, {name: tuple(p.shape) for name, p in ToyDraft(shape).trainable().items()}, tensors)
    target_ids = target_ids_of(folder, d2t, shape.vocab_size)
    return StoredDraft("toy", shape, tuple(config["layers"]), target_ids, tensors, embedding, config)
