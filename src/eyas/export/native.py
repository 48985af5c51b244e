"""The folder that inference engines load: config.json and model.safetensors, verified by reloading.

Which tensors it holds and what config.json says comes from the draft's kind.
"""

from pathlib import Path
from typing import Any

import torch

from eyas import registry
from eyas.errors import ContractError
from eyas.export.read import read_draft
from eyas.files import sha256_of_file, write_json
from eyas.safetensors_io import save_tensors
from eyas.types import TargetSpec, VocabMap


class NativeExporter:
    """Writes what vLLM and SGLang read of a kind of draft; a shared embedding stays with the target."""

    def __init__(self, architecture: str) -> None:
        self.kind = registry.drafter_file(architecture, "export")

    def write(
        self,
        folder: Path,
        draft: Any,
        spec: TargetSpec,
        vocab: VocabMap,
        include_embedding: bool = False,
    ) -> None:
        """Write the draft; ``spec.aux_layer_ids`` are those that it reads."""
        dtype = getattr(torch, spec.dtype)
        tensors = {name: t.cpu().to(dtype).contiguous() for name, t in self.kind.tensors(draft).items()}
        if include_embedding and not draft.config.has_own_embedding:
            tensors["embed_tokens.weight"] = draft.embed_tokens.weight.detach().cpu().to(dtype).contiguous()
        if not vocab.is_full:
            ids = torch.from_numpy(vocab.target_ids)
            # Engines compute target id = draft id + d2t[draft id].
            tensors["d2t"] = ids - torch.arange(len(ids))
            in_draft = torch.zeros(spec.vocab_size, dtype=torch.bool)
            in_draft[ids] = True
            tensors["t2d"] = in_draft
        save_tensors(tensors, folder / "model.safetensors", {"format": "pt"})
        self.write_config(folder, draft, spec, vocab)

    def write_config(self, folder: Path, draft: Any, spec: TargetSpec, vocab: VocabMap) -> None:
        write_json(folder / "config.json", self.described(folder, draft, spec, vocab))

    def described(self, folder: Path, draft: Any, spec: TargetSpec, vocab: VocabMap) -> dict[str, Any]:
        """Return the native config.json, and under "eyas" what the draft was made for."""
        return {
            **self.kind.native_config(draft.config, spec, vocab),
            "eyas": {
                "target": spec.to_json(),
                "target_fingerprint": spec.fingerprint,
                "vocab_fingerprint": vocab.fingerprint,
                "weights_sha256": sha256_of_file(folder / "model.safetensors"),
            },
        }

    @torch.no_grad()
    def verify(
        self, folder: Path, draft: Any, vocab: VocabMap, aux: torch.Tensor, tokens: torch.Tensor
    ) -> None:
        """Reload the folder and compare with the trainer's draft.

        ``aux`` [R, A, D] and ``tokens`` [R] are stored states of consecutive positions and the tokens
        that follow them.
        Raises: ContractError naming what disagrees.
        """
        reloaded, target_ids, config = load_export(
            folder, None if draft.config.has_own_embedding else draft.embed_tokens.weight
        )
        if not torch.equal(target_ids, torch.from_numpy(vocab.target_ids)):
            raise ContractError("the exported d2t does not give back the draft vocabulary")
        self.kind.check_config(config)
        if reloaded.config != draft.config:
            raise ContractError("the exported config.json describes another draft than the one trained")
        expected = self.kind.logits(draft, aux, tokens)
        found = self.kind.logits(reloaded, aux, tokens)
        worst = float((expected - found).abs().max() / expected.abs().max())
        tolerance = {"float32": 1e-5, "bfloat16": 5e-2, "float16": 1e-2}[config["eyas"]["target"]["dtype"]]
        if not worst <= tolerance:
            raise ContractError(f"the exported draft's logits differ from the trained one's by {worst:.2e}")


def load_export(
    folder: Path, embedding: torch.Tensor | None, head: torch.Tensor | None = None
) -> tuple[Any, torch.Tensor, dict[str, Any]]:
    """Rebuild the draft, its target ids [W] and its config.json from an exported folder alone.

    ``embedding`` [V, D] is the target's, as engines share it; a draft of another width needs none. So is
    ``head`` [V, D], which a draft that does not train its own cannot decode without.
    Raises: ContractError for an unknown or missing tensor, as vLLM does; UserError for a damaged folder.
    """
    stored = read_draft(folder)
    shape = stored.shape
    if embedding is None:
        if not shape.has_own_embedding:
            raise ContractError(f"{folder} holds no embedding of its own and was given none")
    elif (shape.target_vocab_size, shape.target_hidden_size) != tuple(embedding.shape):
        raise ContractError(
            f"{folder} is a draft for a target of {shape.target_vocab_size} ids and width "
            f"{shape.target_hidden_size}; this target has {tuple(embedding.shape)}",
            hint="export the draft that was trained for this target",
        )
    own = stored.embedding
    if own is not None and embedding is not None and not torch.equal(own, embedding.cpu().to(own.dtype)):
        raise ContractError(f"{folder} holds another embedding than this target's")
    if stored.aux_layer_ids is None or len(stored.aux_layer_ids) != shape.num_aux_layers:
        named = len(stored.aux_layer_ids or ())
        raise ContractError(f"{folder} names {named} aux layers, its fc takes {shape.num_aux_layers}")
    return stored.build(embedding, head), stored.target_ids, stored.config
