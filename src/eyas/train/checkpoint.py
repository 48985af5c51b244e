"""Checkpoints: a folder that is complete or absent, and that training goes on from bit by bit."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from eyas import registry
from eyas.drafters.base import Draft, DraftConfig
from eyas.errors import ContractError, UserError
from eyas.files import (
    atomic_folder,
    read_json,
    refusing_damaged,
    remove_folder,
    seal,
    sha256_of_file,
    unseal,
    write_json,
)
from eyas.safetensors_io import save_tensors
from eyas.types import TargetSpec, VocabMap

FORMAT_VERSION = 3
# What a weight's own entry in optimizer.safetensors is called, beside its moments.
_MASTER = "master"

Join = Callable[[str, torch.Tensor], torch.Tensor]
Cut = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint folder says about itself; weights are read by ``load_weights``.

    ``spec.aux_layer_ids`` are those that the draft reads.
    """

    folder: Path
    step: int
    num_steps: int
    spec: TargetSpec
    architecture: str
    draft_config: DraftConfig
    vocab: VocabMap
    data_fingerprint: str
    settings_fingerprint: str
    metrics: Mapping[str, Any]


@dataclass(frozen=True)
class State:
    """What training goes on from, whole and in the host's memory: weights, and ``NAME:KEY`` of optimizers."""

    weights: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, torch.Tensor]

    @classmethod
    def of(
        cls,
        parameters: Mapping[str, torch.Tensor],
        optimizers: Sequence[torch.optim.Optimizer],
        masters: Mapping[str, torch.Tensor],
        join: Join | None = None,
    ) -> "State":
        """Take the state of ``parameters``, which ``join`` makes whole by name if ranks hold slices of them.

        ``masters`` are the weights that training goes on from, where ``parameters`` are their average.
        """

        def whole(name: str, value: torch.Tensor) -> torch.Tensor:
            joined = join(name, value) if join and value.ndim else value.detach()  # a step count is no slice
            return joined.cpu().contiguous()

        names_of: dict[torch.Tensor, str] = {parameter: name for name, parameter in parameters.items()}
        moments = {
            f"{names_of[parameter]}:{key}": whole(names_of[parameter], value)
            for optimizer in optimizers
            for parameter, state in optimizer.state.items()
            for key, value in state.items()
        }
        moments |= {f"{name}:{_MASTER}": whole(name, value) for name, value in masters.items()}
        return cls({name: whole(name, p) for name, p in parameters.items()}, moments)


def save_checkpoint(checkpoint: Checkpoint, state: State) -> None:
    """Write weights, optimizer state and description; the frozen embedding stays with the target."""
    with atomic_folder(checkpoint.folder) as folder:
        save_tensors(state.weights, folder / "draft.safetensors")
        save_tensors(state.optimizer, folder / "optimizer.safetensors")
        ids = {"target_ids": torch.from_numpy(checkpoint.vocab.target_ids)}
        save_tensors(ids, folder / "vocab.safetensors")
        names = ("draft.safetensors", "optimizer.safetensors", "vocab.safetensors")
        facts = {
            "format_version": FORMAT_VERSION,
            "step": checkpoint.step,
            "num_steps": checkpoint.num_steps,
            "spec": checkpoint.spec.to_json(),
            "architecture": checkpoint.architecture,
            "draft_config": checkpoint.draft_config.to_json(),
            "data_fingerprint": checkpoint.data_fingerprint,
            "settings_fingerprint": checkpoint.settings_fingerprint,
            "metrics": checkpoint.metrics,
            "sha256": {name: sha256_of_file(folder / name) for name in names},
        }
        write_json(folder / "checkpoint.json", seal(facts))


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read and verify a checkpoint folder.

    Raises: UserError when there is none; ContractError when a file is not what was written.
    """
    path = folder / "checkpoint.json"
    if not path.is_file():
        raise UserError(f"{folder} is not a checkpoint", hint="run: eyas train -c <run file>")
    hint = f"remove {folder}; training goes on from the checkpoint before it, or from the start"
    with refusing_damaged(path, hint):
        value = unseal(read_json(path), FORMAT_VERSION)
    for name, digest in value["sha256"].items():
        if not (folder / name).is_file() or sha256_of_file(folder / name) != digest:
            raise ContractError(f"{folder / name} is damaged or missing", hint=hint)
    spec = TargetSpec.from_json(value["spec"])
    ids = load_file(folder / "vocab.safetensors")["target_ids"].numpy().astype(np.int64)
    return Checkpoint(
        folder=folder,
        step=value["step"],
        num_steps=value["num_steps"],
        spec=spec,
        architecture=value["architecture"],
        draft_config=registry.drafter(value["architecture"]).config_from_json(value["draft_config"]),
        vocab=VocabMap(ids, spec.vocab_size),
        data_fingerprint=value["data_fingerprint"],
        settings_fingerprint=value["settings_fingerprint"],
        metrics=value["metrics"],
    )


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@torch.no_grad()
def load_weights(
    checkpoint: Checkpoint,
    draft: Draft,
    parameters: Mapping[str, torch.Tensor] | None = None,
    cut: Cut = _whole,
) -> None:
    """Copy the trained weights into ``draft``; every trainable tensor must be there, and no other.

    With ``parameters``, into those instead, what ``cut`` leaves of each.
    """
    stored = load_file(checkpoint.folder / "draft.safetensors")
    trainable = draft.trainable()
    if set(stored) != set(trainable):
        raise ContractError(
            f"{checkpoint.folder} holds other tensors: {sorted(set(stored) ^ set(trainable))}"
        )
    for name, parameter in trainable.items():
        if stored[name].shape != parameter.shape:
            raise ContractError(f"{checkpoint.folder}: {name} is {tuple(stored[name].shape)}")
        (parameters or trainable)[name].copy_(cut(stored[name]))


@torch.no_grad()
def load_optimizers(
    checkpoint: Checkpoint,
    parameters: Mapping[str, torch.Tensor],
    optimizers: Sequence[torch.optim.Optimizer],
    cut: Cut = _whole,
) -> None:
    """Restore the fp32 moments and step counts of each parameter's optimizer, and masters if there are.

    ``cut`` leaves of a tensor what ``parameters`` hold of it.
    """
    state_of = {
        parameter: optimizer.state[parameter]
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    for entry, value in load_file(checkpoint.folder / "optimizer.safetensors").items():
        name, key = entry.split(":")
        parameter = parameters[name]
        if key == _MASTER:
            parameter.copy_(cut(value))
        else:
            state_of[parameter][key] = (cut(value) if value.ndim else value).to(parameter.device)


def checkpoint_folder(root: Path, step: int) -> Path:
    return root / f"step-{step:06d}"


def latest_checkpoint(root: Path) -> Path | None:
    """Return the folder of the newest complete checkpoint."""
    folders = sorted(p for p in root.glob("step-*") if (p / "checkpoint.json").is_file())
    return folders[-1] if folders else None


def best_checkpoint(root: Path) -> Path | None:
    """Return the folder that ``best.json`` names."""
    pointer = root / "best.json"
    if not pointer.is_file():
        return None
    try:
        return checkpoint_folder(root, int(read_json(pointer)["step"]))
    except (ValueError, TypeError, KeyError) as error:
        raise ContractError(
            f"{pointer} is damaged: {error}", hint="remove it and run the same eyas train again"
        ) from None


def mark_best(root: Path, step: int) -> None:
    write_json(root / "best.json", {"step": step})


def prune(root: Path) -> None:
    """Keep the last and the best checkpoint."""
    keep = {latest_checkpoint(root), best_checkpoint(root)}
    for folder in root.glob("step-*"):
        if folder not in keep:
            remove_folder(folder)


def remove_all(root: Path) -> None:
    """Remove every checkpoint, the oldest last, and the mark of the best."""
    for folder in sorted(root.glob("step-*"), reverse=True):
        remove_folder(folder)
    (root / "best.json").unlink(missing_ok=True)
