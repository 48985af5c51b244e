"""The probe lets an honest engine pass and stops each of the field's silent failures, naming it."""

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from eyas.engines.base import ProbeOutput
from eyas.engines.probe import (
    ProbeError,
    compare_states,
    outside_envelope,
    probe,
    probe_again,
    probe_samples,
    row_norms,
)
from eyas.engines.transformers.engine import TransformersEngine
from eyas.targets.teacher import TeacherHead, read_teacher
from eyas.types import Failure, HiddenStates, TargetSpec, TokenizedSample
from vllm_cases import make_model, mixed_samples, sample_of, spec_of_model

AUX = (1, 2, 3)
Spoil = Callable[[ProbeOutput], ProbeOutput | Failure]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def spec(folder: Path) -> TargetSpec:
    return spec_of_model(folder, AUX)


@pytest.fixture(scope="module")
def honest(folder: Path, spec: TargetSpec) -> TransformersEngine:
    return TransformersEngine(folder, spec)


@pytest.fixture(scope="module")
def teacher(folder: Path, spec: TargetSpec) -> TeacherHead:
    return read_teacher(folder, spec)


class Spoiled:
    """An engine whose witnesses are changed on the way out."""

    streams = False

    def __init__(self, engine: TransformersEngine, spoil: Spoil, only_in_batches: bool = False) -> None:
        self.engine, self.spoil, self.only_in_batches = engine, spoil, only_in_batches

    def probe_outputs(self, samples: Iterable[TokenizedSample]) -> list[ProbeOutput | Failure]:
        samples = list(samples)
        items = self.engine.probe_outputs(samples)
        if self.only_in_batches and len(samples) == 1:
            return items
        return [self.spoil(i) for i in items if isinstance(i, ProbeOutput)]


def changed(
    output: ProbeOutput, aux: torch.Tensor | None = None, last: torch.Tensor | None = None
) -> ProbeOutput:
    states = output.states
    states = HiddenStates(
        states.sample, states.aux if aux is None else aux, states.last if last is None else last
    )
    return dataclasses.replace(output, states=states)


def run_probe(engine: object, spec: TargetSpec, teacher: TeacherHead, reference: object = None):
    samples = probe_samples(mixed_samples([120, 80, 60, 40]))
    return probe(engine, spec, samples, teacher.logits, reference)  # type: ignore[arg-type]


def test_an_honest_engine_passes_at_the_start_and_at_the_end(
    honest: TransformersEngine, spec: TargetSpec, teacher: TeacherHead
) -> None:
    probed = run_probe(honest, spec, teacher, reference=honest)
    assert probed.envelope.shape == (4, 2)
    probe_again(honest, spec, probed)


def test_the_probe_says_what_it_did_not_compare(
    honest: TransformersEngine, spec: TargetSpec, teacher: TeacherHead
) -> None:
    assert run_probe(honest, spec, teacher).notes == ("not compared with the transformers engine",)


def test_probe_samples_are_short_of_several_lengths_and_fully_asked_for() -> None:
    made = probe_samples(mixed_samples([120, 3, 60]))
    assert [len(s) for s in made] == [1, 6, 19, 47, 96]
    assert all(s.supervised.all() for s in made)
    assert [len(s) for s in probe_samples([sample_of("a", [4, 5])])] == [1, 2, 2, 2, 2]


SPOILS: dict[str, tuple[Spoil, str]] = {
    "last is another layer's": (lambda w: changed(w, last=1.001 * w.states.aux[:, -1]), "probe, teacher"),
    "one layer of three, broadcast": (
        lambda w: changed(w, aux=w.states.aux[:, :1].expand(-1, 3, -1)),
        "probe, layers: layer 1 and layer 2 hold the same states",
    ),
    "all zero": (lambda w: changed(w, aux=w.states.aux * torch.tensor([1, 0, 1])[:, None]),
                 "probe, zero: layer 2"),
    "not a number": (lambda w: changed(w, last=w.states.last / 0 * 0), "probe, finite: the last layer"),
    "too few layers": (lambda w: changed(w, aux=w.states.aux[:, :2]), "probe, shape: the engine gave 2"),
    "another type": (
        lambda w: changed(w, w.states.aux.bfloat16(), w.states.last.bfloat16()),
        "probe, dtype: the engine gave torch.bfloat16",
    ),
    "every request's states are the first's": (
        lambda w: changed(w, last=torch.ones_like(w.states.last)),
        "probe, (teacher|samples)",
    ),
    "a sample fails": (lambda w: Failure("probe-0", "out of memory"), "failed on probe-0: out of memory"),
    "ranks differ": (
        lambda w: dataclasses.replace(w, rank_digests=(tuple("1234"), tuple("1294"))),
        r"probe, ranks: rank 1 holds other states at layer 3 than rank 0 \(checksums 9 and 3\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SPOILS)
def test_the_probe_stops_an_engine_of_which(
    name: str, honest: TransformersEngine, spec: TargetSpec, teacher: TeacherHead
) -> None:
    spoil, message = SPOILS[name]
    with pytest.raises(ProbeError, match=message):
        run_probe(Spoiled(honest, spoil), spec, teacher)


def test_states_after_the_final_norm_are_stopped(
    honest: TransformersEngine, spec: TargetSpec, teacher: TeacherHead
) -> None:
    engine = Spoiled(honest, lambda w: changed(w, last=teacher.normed(w.states.last)))
    with pytest.raises(ProbeError, match="probe, teacher"):
        run_probe(engine, spec, teacher)


def test_a_final_norm_read_as_one_plus_w_is_stopped(
    honest: TransformersEngine, spec: TargetSpec, teacher: TeacherHead
) -> None:
    with pytest.raises(ProbeError, match="probe, teacher"):
        run_probe(honest, spec, dataclasses.replace(teacher, norm_kind="rms_one_plus"))


def test_layers_off_by_one_are_stopped_by_the_comparison_with_transformers(
    folder: Path, honest: TransformersEngine, spec: TargetSpec, teacher: TeacherHead
) -> None:
    shifted = TransformersEngine(folder, spec_of_model(folder, (0, 1, 2)))
    with pytest.raises(ProbeError, match="in this engine and in transformers: layer 1 by"):
        run_probe(shifted, spec, teacher, reference=honest)


def test_rounding_in_bfloat16_passes_and_what_is_more_does_not(spec: TargetSpec) -> None:
    half = dataclasses.replace(spec, dtype="bfloat16")
    known = {"a": torch.randn(50, 4, 64)}

    def differing(typical: float, one_row: float) -> dict[str, torch.Tensor]:
        by = torch.full((50, 1, 1), typical)
        by[17] = one_row
        return {"a": known["a"] * (1 + by)}

    compare_states(differing(0.05, 0.16), known, half, "here and there")
    with pytest.raises(ProbeError, match=r"of 1 samples differ here and there: .* by 0.08 of the median row"):
        compare_states(differing(0.08, 0.08), known, half, "here and there")
    with pytest.raises(ProbeError, match=r"of a \(50 tokens\) differ here and there: .* by 0.4 of a row"):
        compare_states(differing(0.0, 0.4), known, half, "here and there")


def test_states_that_depend_on_the_batch_are_stopped(
    honest: TransformersEngine, spec: TargetSpec, teacher: TeacherHead
) -> None:
    def lose_a_row(w: ProbeOutput) -> ProbeOutput:
        return changed(w, aux=torch.cat([w.states.aux[:1], w.states.aux[:-1]]))

    with pytest.raises(ProbeError, match="differ alone and in a batch"):
        run_probe(Spoiled(honest, lose_a_row, only_in_batches=True), spec, teacher)


def test_an_engine_that_drifts_is_stopped_at_the_end(
    honest: TransformersEngine, spec: TargetSpec, teacher: TeacherHead
) -> None:
    probed = run_probe(honest, spec, teacher)
    with pytest.raises(ProbeError, match=r"at the start and at the end: layer [123] by"):
        probe_again(Spoiled(honest, lambda w: changed(w, aux=w.states.aux * 1.1)), spec, probed)  # type: ignore[arg-type]


def test_the_envelope_knows_the_probes_magnitude(
    honest: TransformersEngine, spec: TargetSpec, teacher: TeacherHead
) -> None:
    probed = run_probe(honest, spec, teacher)
    (states,) = honest.capture(mixed_samples([70], seed=3))
    assert isinstance(states, HiddenStates)
    envelope, norms = probed.envelope[:-1], row_norms(states.aux)
    assert outside_envelope([norms, norms[:1] * 200], envelope) is None  # one row tells nothing
    assert outside_envelope([norms * torch.tensor([1, 1, 200])], envelope) == (0, 2)
    assert outside_envelope([norms[:1], norms, norms * torch.tensor([1, 0.001, 1])], envelope) == (2, 1)
