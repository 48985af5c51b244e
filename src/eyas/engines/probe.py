"""The contract probe: a few short samples, before the first shard and again at the end.

Two thirds of what silently ruins such a run is visible here: a layer too many or too few, states of
another layer, after the norm, of the warm-up, of another request, or one rank's share. Each check that
fails is one error that names the check, the layer and the figures.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from eyas.engines.base import Engine, ProbeOutput
from eyas.errors import ContractError
from eyas.types import Failure, TargetSpec, TokenizedSample

Logits = Callable[[torch.Tensor], torch.Tensor]  # last [R, D] -> [R, V]

PROBE_LENGTHS = (1, 6, 19, 47, 96)
# How far two computations of a layer may differ, relative to the row: the median row, and the worst. Batches
# and engines round differently. In bfloat16 SmolLM2's median row moves by 0.05 at most and its worst by 0.16;
# rows of the layer above or below lie 0.2 away (benchmarks/LOG.md).
STATE_TOLERANCE = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 6e-2}
WORST_ROW = {"float32": 1e-3, "float16": 1e-1, "bfloat16": 0.35}
LOGPROB_TOLERANCE = {"float32": 1e-2, "float16": 0.1, "bfloat16": 0.35}
# Between the probe's rows and a sample's: long texts hold rows that short ones do not.
ENVELOPE_FACTOR = 30.0


class ProbeError(ContractError):
    """The engine's states are not what they claim to be; nothing has been written."""


@dataclass(frozen=True)
class Probed:
    """What an engine showed at its start; later states are held against it.

    Shapes: states [T, A + 1, D] by sample; envelope [A + 1, 2], least and largest median row norm.
    """

    samples: tuple[TokenizedSample, ...]
    states: dict[str, torch.Tensor]
    envelope: torch.Tensor
    seconds: float
    notes: tuple[str, ...]


def probe_samples(samples: Sequence[TokenizedSample]) -> list[TokenizedSample]:
    """Cut the beginnings of a few samples to several lengths, every row of them asked for."""
    distinct: dict[bytes, np.ndarray] = {}
    longest = sorted(samples, key=len, reverse=True)
    for sample in longest[:: max(1, len(longest) // 50)]:
        distinct.setdefault(sample.input_ids[: PROBE_LENGTHS[-1]].tobytes(), sample.input_ids)
    made = []
    for number, length in enumerate(PROBE_LENGTHS):
        sources = [ids for ids in distinct.values() if len(ids) >= length] or list(distinct.values())[:1]
        ids = sources[number % len(sources)][:length]
        made.append(TokenizedSample(f"probe-{number}", ids, np.ones(len(ids), dtype=bool), cut=True))
    return made


def probe(
    engine: Engine,
    spec: TargetSpec,
    samples: Sequence[TokenizedSample],
    logits: Logits,
    reference: Engine | None = None,
) -> Probed:
    """Hold the engine to its contract on ``samples`` (from ``probe_samples``).

    ``logits`` is the teacher read from the model folder; ``reference`` another engine to agree with.
    Raises: ProbeError.
    """
    started = time.monotonic()
    notes: list[str] = []
    alone = {s.sample_id: _probe_outputs(engine, [s])[0] for s in samples}
    for output in alone.values():
        check_shape(output, spec)
        check_layers(output, spec)
        check_ranks(output, spec)
        if output.next_token is not None:
            check_teacher(output, spec, logits)
    if any(w.next_token is None for w in alone.values()):
        notes.append("the engine has no logits of its own to compare the teacher with")
    check_samples_differ(list(alone.values()), spec)
    states = {sample_id: full_states(w) for sample_id, w in alone.items()}
    together = {w.states.sample.sample_id: full_states(w) for w in _probe_outputs(engine, samples)}
    compare_states(together, states, spec, "alone and in a batch")
    _compare_chunked(engine, samples, states, spec)
    if reference is None:
        notes.append("not compared with the transformers engine")
    else:
        known = {w.states.sample.sample_id: full_states(w) for w in _probe_outputs(reference, samples)}
        compare_states(states, known, spec, "in this engine and in transformers")
    return Probed(
        tuple(samples), states, envelope_of(states.values()), time.monotonic() - started, tuple(notes)
    )


def probe_again(engine: Engine, spec: TargetSpec, probed: Probed) -> None:
    """Raise ProbeError unless the engine still gives the states it gave at the start."""
    now = {w.states.sample.sample_id: full_states(w) for w in _probe_outputs(engine, probed.samples)}
    compare_states(now, probed.states, spec, "at the start and at the end")


def full_states(output: ProbeOutput) -> torch.Tensor:
    """Return aux and last as one [T, A + 1, D]; every row of a probe sample is supervised."""
    return torch.cat([output.states.aux, output.states.last[:, None]], dim=1)


def layer_names(spec: TargetSpec) -> list[str]:
    return [*(f"layer {i}" for i in spec.aux_layer_ids), f"the last layer ({spec.num_layers})"]


def check_shape(output: ProbeOutput, spec: TargetSpec) -> None:
    aux = output.states.aux
    if aux.shape[1:] != (spec.num_aux_layers, spec.hidden_size):
        raise ProbeError(
            f"probe, shape: the engine gave {aux.shape[1]} layers of width {aux.shape[2]}, "
            f"asked for {spec.num_aux_layers} of {spec.hidden_size}"
        )
    for values in (aux, output.states.last):
        if str(values.dtype) != f"torch.{spec.dtype}":
            raise ProbeError(f"probe, dtype: the engine gave {values.dtype}, asked for {spec.dtype}")


def check_layers(output: ProbeOutput, spec: TargetSpec) -> None:
    """Refuse layers that are not finite, zero, or copies of each other."""
    states, names = full_states(output).float(), layer_names(spec)
    for place, name in enumerate(names):
        if not states[:, place].isfinite().all():
            raise ProbeError(f"probe, finite: {name} holds values that are not finite")
        if not states[:, place].any():
            raise ProbeError(f"probe, zero: {name} is all zero")
    ids = (*spec.aux_layer_ids, spec.num_layers)
    for a in range(len(ids)):
        for b in range(a):
            if ids[a] != ids[b] and torch.equal(states[:, a], states[:, b]):
                raise ProbeError(
                    f"probe, layers: {names[b]} and {names[a]} hold the same states",
                    hint="the engine broadcast one layer, or captured another one than it was asked for",
                )


def check_ranks(output: ProbeOutput, spec: TargetSpec) -> None:
    """All tensor-parallel ranks must hold equal states: checksums were made in the workers."""
    ids = sorted({*spec.aux_layer_ids, spec.num_layers})
    for rank, digests in enumerate(output.rank_digests):
        for layer_id, own, first in zip(ids, digests, output.rank_digests[0], strict=True):
            if own != first:
                raise ProbeError(
                    f"probe, ranks: rank {rank} holds other states at layer {layer_id} than rank 0 "
                    f"(checksums {own} and {first})",
                    hint="one rank's share was captured instead of the sum over all ranks",
                )


def check_teacher(output: ProbeOutput, spec: TargetSpec, logits: Logits) -> None:
    """The teacher rebuilt from ``last`` must agree with the engine's own next token and log-probability."""
    tolerance = LOGPROB_TOLERANCE[spec.dtype]
    scores = torch.log_softmax(logits(output.states.last[-1:]).float(), dim=-1)[0]
    token, best = output.next_token, int(scores.argmax())
    assert token is not None
    gap, difference = (
        float(scores[best] - scores[token]),
        abs(float(scores[token]) - output.next_logprob),
    )
    if gap > tolerance or difference > tolerance:
        raise ProbeError(
            f"probe, teacher: after {len(output.states.sample)} tokens the engine's next token is {token} "
            f"with log-probability {output.next_logprob:.4f}; final norm and head on its last states give "
            f"{float(scores[token]):.4f} and prefer {best} by {gap:.4f}",
            hint="the last states are of another layer, after the final norm, or of another request",
        )


def check_samples_differ(witnesses: Sequence[ProbeOutput], spec: TargetSpec) -> None:
    """Two samples that end in other texts must not end in the same states."""
    for a in range(len(witnesses)):
        for b in range(a):
            one, two = witnesses[a].states, witnesses[b].states
            same_text = one.sample.input_ids.tolist() == two.sample.input_ids.tolist()
            if not same_text and torch.equal(one.last[-1], two.last[-1]):
                raise ProbeError(
                    f"probe, samples: {len(one.sample)} and {len(two.sample)} tokens of different text "
                    "end in the same last state",
                    hint="the engine returned one request's states for another",
                )


def row_norms(states: torch.Tensor) -> torch.Tensor:
    """Return the norms [T, L] of rows [T, L, D]."""
    return torch.linalg.vector_norm(states, dim=-1, dtype=torch.float32)


def envelope_of(states: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the least and the largest median row norm of each layer [L, 2].

    The first row is left out where there are others: the first token often carries activations
    hundreds of times larger than all later ones.
    """
    medians = [row_norms(s)[min(1, len(s) - 1) :].median(0).values for s in states]
    stacked = torch.stack(medians[1:] or medians)
    return torch.stack([stacked.amin(0), stacked.amax(0)], dim=1)


def outside_envelope(norms: Sequence[torch.Tensor], envelope: torch.Tensor) -> tuple[int, int] | None:
    """Return the first sample and layer whose row norms [T, L] are of a magnitude the probe never saw."""
    places = [i for i, sample in enumerate(norms) if len(sample) > 1]
    if not places:
        return None
    medians = torch.stack([norms[i][1:].median(0).values for i in places])
    bad = (medians * ENVELOPE_FACTOR < envelope[:, 0]) | (medians > envelope[:, 1] * ENVELOPE_FACTOR)
    if not bad.any():
        return None
    place, layer = bad.nonzero()[0].tolist()
    return places[place], layer


def _probe_outputs(engine: Engine, samples: Sequence[TokenizedSample]) -> list[ProbeOutput]:
    items = engine.probe_outputs(samples)
    for item in items:
        if isinstance(item, Failure):
            raise ProbeError(f"probe: the engine failed on {item.sample_id}: {item.reason}")
    witnesses = [item for item in items if isinstance(item, ProbeOutput)]
    if sorted(w.states.sample.sample_id for w in witnesses) != sorted(s.sample_id for s in samples):
        raise ProbeError(f"probe: {len(samples)} samples went in, {len(witnesses)} came out")
    return witnesses


def _compare_chunked(
    engine: Engine, samples: Sequence[TokenizedSample], states: dict[str, torch.Tensor], spec: TargetSpec
) -> None:
    """Ask for so many samples at once that a batch's token limit cuts some of them in chunks.

    A causal model's first rows do not depend on what follows, so rows computed while other samples fill
    the batch must be the rows of the sample alone.
    """
    longest = max(samples, key=len)
    crowd = [dataclasses.replace(longest, sample_id=f"{longest.sample_id}-{i}") for i in range(4)]
    shorter = [
        TokenizedSample(f"prefix-{n}", longest.input_ids[:n], np.ones(n, dtype=bool), cut=True)
        for n in sorted({max(1, len(longest) // 3), max(1, 2 * len(longest) // 3)})
    ]
    own = states[longest.sample_id]
    for output in _probe_outputs(engine, [*crowd, *shorter]):
        sample_id, found = output.states.sample.sample_id, full_states(output)
        compare_states(
            {sample_id: found}, {sample_id: own[: len(found)]}, spec, "alone and among copies and prefixes"
        )


def compare_states(
    found: dict[str, torch.Tensor], known: dict[str, torch.Tensor], spec: TargetSpec, where: str
) -> None:
    """Rows must agree within the dtype's rounding, each measured by its own size."""
    typical, most = STATE_TOLERANCE[spec.dtype], WORST_ROW[spec.dtype]
    differences = {}
    for sample_id, one in found.items():
        two = known[sample_id].float()
        differences[sample_id] = row_norms(one.float() - two) / row_norms(two).clamp(min=1e-12)  # (T, A + 1)
        worst = differences[sample_id].amax(0)
        layer = int(worst.argmax())
        if not float(worst[layer]) <= most:
            raise ProbeError(
                f"probe: the states of {sample_id} ({len(two)} tokens) differ {where}: "
                f"{layer_names(spec)[layer]} by {float(worst[layer]):.2g} of a row, allowed {most:.2g}"
            )
    median = torch.cat(list(differences.values())).median(0).values
    layer = int(median.argmax())
    if not float(median[layer]) <= typical:
        raise ProbeError(
            f"probe: the states of {len(differences)} samples differ {where}: {layer_names(spec)[layer]} "
            f"by {float(median[layer]):.2g} of the median row, allowed {typical:.2g}"
        )
