"""The nouns every part of eyas speaks in. Frozen, and checked where they are made.

Axis letters, one legend for the package:
    T tokens of a sample     A aux layers            D target width     V target vocabulary
    W draft vocabulary       S steps of a draft on its own states (draft.ttt_steps)
    K draft tokens a round   R supervised rows       N tokens of several samples
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from eyas.errors import ContractError, UserError
from eyas.files import fingerprint
from eyas.layer_ids import ReadLayers, check_aux_layer_ids
from eyas.typed_json import parse

if TYPE_CHECKING:
    import torch

ROLES = ("system", "user", "assistant", "tool", "developer")


@dataclass(frozen=True)
class Message:
    """One turn. ``tool_calls`` and ``tools`` keep the shape of the OpenAI chat format.

    ``cut`` says that an answer met its length limit, so that its end-of-turn was never generated.
    ``trained`` is False for an answer that is context only.
    """

    role: str
    content: str
    reasoning: str | None = None
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    name: str | None = None
    tool_call_id: str | None = None
    cut: bool = False
    trained: bool = True

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise UserError(f"unknown role {self.role!r}", hint=f"known roles: {', '.join(ROLES)}")

    def to_json(self) -> dict[str, Any]:
        """Return the fields; ``trained`` only where it is False, so that other hashes do not change."""
        values = dict(vars(self))
        if self.trained:
            del values["trained"]
        return values

    def for_template(self) -> dict[str, Any]:
        """Return the dict that chat templates read."""
        out: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning is not None:
            out["reasoning_content"] = self.reasoning
        if self.tool_calls:
            out["tool_calls"] = [dict(call) for call in self.tool_calls]
        if self.name is not None:
            out["name"] = self.name
        if self.tool_call_id is not None:
            out["tool_call_id"] = self.tool_call_id
        return out


@dataclass(frozen=True)
class Conversation:
    """Messages in order, known by an id that survives re-ordering of its source."""

    conversation_id: str
    messages: tuple[Message, ...]
    source: str
    tools: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if not self.messages:
            raise UserError(f"conversation {self.conversation_id} has no messages")

    def for_template(self) -> list[dict[str, Any]]:
        return [message.for_template() for message in self.messages]


def supervised_positions(loss_mask: np.ndarray, cut: bool) -> np.ndarray:
    """Return the positions whose teacher the draft learns from, as a bool array [T].

    Position t counts when token t and the token after it are both the assistant's. The token after
    the last one exists in this sense only when the answer was ``cut`` there and would have gone on.
    """
    following = np.append(loss_mask[1:], cut)
    return loss_mask & following


@dataclass(frozen=True)
class TokenizedSample:
    """Token ids as the server would see them.

    Shapes: input_ids [T] int32, loss_mask [T] bool (True where the assistant wrote the token).
    ``cut`` says that the last answer goes on beyond the last token.
    """

    sample_id: str
    input_ids: np.ndarray
    loss_mask: np.ndarray
    cut: bool = False

    def __post_init__(self) -> None:
        if self.input_ids.ndim != 1 or self.input_ids.shape != self.loss_mask.shape:
            raise ContractError(
                f"sample {self.sample_id}: {self.input_ids.shape} token ids but {self.loss_mask.shape} mask"
            )
        if not self.supervised.any():
            raise ContractError(f"sample {self.sample_id}: no supervised row")
        if self.input_ids.min() < 0:
            raise ContractError(f"sample {self.sample_id}: negative token id {self.input_ids.min()}")

    @cached_property
    def supervised(self) -> np.ndarray:
        return supervised_positions(self.loss_mask, self.cut)

    def __len__(self) -> int:
        return len(self.input_ids)


# The shape of attention over latents (MLA), as in config.json.
LATENT_KEYS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
NormKind = Literal["rms", "rms_one_plus", "layer"]
_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
# A whole number of config.json stays one: fingerprints are of the text.
_Number = int | float


@dataclass(frozen=True)
class TargetSpec:
    """All that eyas has to know about a target; the only home of layer ids.

    It travels manifest -> checkpoint -> export, and two stages that disagree on it refuse to mix.
    ``rope_parameters`` is transformers' dict of that name; ``norm_kind`` says how the final norm
    uses its weight (``rms_one_plus`` multiplies by 1 + w).
    """

    model: str
    revision: str | None
    architecture: str
    hidden_size: int
    vocab_size: int
    num_layers: int
    aux_layer_ids: tuple[int, ...]
    dtype: str
    norm_kind: NormKind
    norm_eps: _Number
    logit_softcap: _Number | None
    logit_scale: _Number
    tied_head: bool
    eos_token_ids: tuple[int, ...]
    tokenizer_fingerprint: str
    template_fingerprint: str
    weights_fingerprint: str
    # The shape a draft copies unless told otherwise.
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    rope_parameters: Mapping[str, Any] = field(default_factory=dict)
    # Ranks and head widths of attention over latents (MLA), named as in config.json; None: another attention.
    latent_attention: Mapping[str, int | None] | None = None

    def __post_init__(self) -> None:
        check_aux_layer_ids(self.aux_layer_ids, self.num_layers)
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"{self.num_attention_heads} attention heads do not divide into "
                f"{self.num_key_value_heads} key/value heads",
                hint="check num_attention_heads and num_key_value_heads in the target's config.json",
            )

    @property
    def num_aux_layers(self) -> int:
        return len(self.aux_layer_ids)

    @property
    def read_layers(self) -> ReadLayers:
        return ReadLayers(self.aux_layer_ids, self.architecture, self.num_layers)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that the states of one fully supervised token take in a store."""
        return (self.num_aux_layers + 1) * self.hidden_size * _ITEMSIZE[self.dtype]

    @cached_property
    def fingerprint(self) -> str:
        """Identify the states' meaning: everything but where the model folder lies."""
        return fingerprint({k: v for k, v in self.to_json().items() if k not in ("model", "revision")})

    def to_json(self) -> dict[str, Any]:
        out = dataclasses.asdict(self)
        out["rope_parameters"] = dict(self.rope_parameters)
        return {k: list(v) if isinstance(v, tuple) else v for k, v in out.items()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TargetSpec:
        """Raises: ContractError for a field that is missing, unknown or of another type."""
        try:
            spec = parse(cls, value)
        except ValueError as error:
            raise ContractError(f"the description of the target is wrong: {error}") from None
        if spec.dtype not in _ITEMSIZE:
            raise ContractError(f"the description of the target is wrong: dtype is {spec.dtype!r}")
        return spec


@dataclass(frozen=True)
class HiddenStates:
    """What the target computed for one sample.

    Shapes: aux [T, A, D]; last [R, D], the stream before the final norm at the sample's supervised
    positions, in order. Engines make them with ``select`` from the full [T, D].
    ``figures`` are those of ``eyas.row_stats``, of aux [T, A, 4] and last [R, 4], from an engine that took
    them before it handed the states over.
    """

    sample: TokenizedSample
    aux: torch.Tensor
    last: torch.Tensor
    figures: tuple[torch.Tensor, torch.Tensor] | None = None

    def __post_init__(self) -> None:
        num_tokens, num_rows = len(self.sample), int(self.sample.supervised.sum())
        if self.aux.ndim != 3 or self.aux.shape[0] != num_tokens:
            raise ContractError(
                f"sample {self.sample.sample_id}: {num_tokens} tokens but aux states {tuple(self.aux.shape)}",
                hint="the engine returned states of another request or dropped rows",
            )
        if self.last.shape != (num_rows, self.aux.shape[2]):
            raise ContractError(
                f"sample {self.sample.sample_id}: last states {tuple(self.last.shape)}, "
                f"expected {(num_rows, self.aux.shape[2])}"
            )
        if self.figures is not None:
            shapes = tuple(tuple(part.shape) for part in self.figures)
            if shapes != ((*self.aux.shape[:2], 4), (num_rows, 4)):
                raise ContractError(f"sample {self.sample.sample_id}: figures of other rows, {shapes}")

    @classmethod
    def select(
        cls,
        sample: TokenizedSample,
        aux: torch.Tensor,
        last: torch.Tensor,
        figures: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> HiddenStates:
        """Keep of ``last`` [T, D], and of its figures [T, 4], the rows that a teacher is needed for."""
        import torch

        if last.shape[0] != len(sample):
            raise ContractError(f"sample {sample.sample_id}: {len(sample)} tokens but {last.shape[0]} rows")
        if sample.supervised.all():
            return cls(sample, aux, last, figures)
        keep = torch.from_numpy(sample.supervised)
        return cls(sample, aux, last[keep], None if figures is None else (figures[0], figures[1][keep]))


@dataclass(frozen=True)
class Failure:
    """A sample that an engine could not serve; a value, so that it is counted and never a gap."""

    sample_id: str
    reason: str


@dataclass(frozen=True)
class Completion:
    """An answer as the target generated it. ``token_ids`` include the end-of-turn if it was generated."""

    prompt_id: str
    token_ids: tuple[int, ...]
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True)
class VocabMap:
    """The target token ids that a draft can propose.

    Shapes: target_ids [W] ascending int64. ``d2t`` offsets and ``t2d`` masks exist only in exporters.
    """

    target_ids: np.ndarray
    target_vocab_size: int

    def __post_init__(self) -> None:
        ids = self.target_ids
        if ids.ndim != 1 or not len(ids) or (np.diff(ids) <= 0).any():
            raise ContractError("the draft vocabulary must be ascending, distinct target ids")
        if ids[0] < 0 or ids[-1] >= self.target_vocab_size:
            raise ContractError(
                f"draft vocabulary id {ids[-1]} exceeds the target's {self.target_vocab_size}"
            )

    def __len__(self) -> int:
        return len(self.target_ids)

    @property
    def is_full(self) -> bool:
        return len(self) == self.target_vocab_size

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint([self.target_vocab_size, self.target_ids.tolist()])
