"""What the probe compares, each comparison by an engine that only it can stop."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest
import torch
from test_probe import AUX, changed, run_probe

from eyas.engines.base import ProbeOutput
from eyas.engines.probe import (
    ProbeError,
    check_teacher,
    compare_states,
    envelope_of,
    outside_envelope,
    probe_samples,
)
from eyas.engines.transformers.engine import TransformersEngine
from eyas.targets.teacher import TeacherHead, read_teacher
from eyas.types import Failure, TargetSpec, TokenizedSample
from vllm_cases import make_model, mixed_samples, spec_of_model


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


class SpoiledWhere:
    """An engine that spoils the states of a sample where ``applies`` says so of the call and the sample."""

    streams = False

    def __init__(
        self, engine: TransformersEngine, applies: Callable[[Sequence[TokenizedSample], str], bool]
    ) -> None:
        self.engine, self.applies = engine, applies

    def probe_outputs(self, samples: Iterable[TokenizedSample]) -> list[ProbeOutput | Failure]:
        samples = list(samples)
        found: list[ProbeOutput | Failure] = []
        for item in self.engine.probe_outputs(samples):
            assert isinstance(item, ProbeOutput)
            wrong = self.applies(samples, item.states.sample.sample_id)
            found.append(changed(item, aux=item.states.aux.roll(1, 0)) if wrong else item)
        return found


def is_probe_batch(samples: Sequence[TokenizedSample]) -> bool:
    return (
        len(samples) > 1
        and all(s.sample_id.startswith("probe-") for s in samples)
        and (len({len(s) for s in samples}) == len(samples))
    )


def test_an_engine_that_is_wrong_only_among_copies_is_stopped(
    honest: TransformersEngine, spec: TargetSpec, teacher: TeacherHead
) -> None:
    engine = SpoiledWhere(honest, lambda samples, name: name.count("-") == 2)  # probe-4-0, a copy
    with pytest.raises(ProbeError, match="alone and among copies and prefixes"):
        run_probe(engine, spec, teacher)


def test_an_engine_that_is_wrong_only_in_prefixes_is_stopped(
    honest: TransformersEngine, spec: TargetSpec, teacher: TeacherHead
) -> None:
    engine = SpoiledWhere(honest, lambda samples, name: name.startswith("prefix-"))
    with pytest.raises(ProbeError, match="alone and among copies and prefixes"):
        run_probe(engine, spec, teacher)


def test_an_engine_that_is_wrong_only_in_a_batch_of_different_samples_is_stopped(
    honest: TransformersEngine, spec: TargetSpec, teacher: TeacherHead
) -> None:
    engine = SpoiledWhere(honest, lambda samples, name: is_probe_batch(samples))
    with pytest.raises(ProbeError, match="alone and in a batch"):
        run_probe(engine, spec, teacher)


def test_one_wrong_sample_of_a_batch_is_enough(
    honest: TransformersEngine, spec: TargetSpec, teacher: TeacherHead
) -> None:
    engine = SpoiledWhere(honest, lambda samples, name: len(samples) > 1 and name == "probe-1")
    with pytest.raises(ProbeError, match="the states of probe-1 "):
        run_probe(engine, spec, teacher)


def test_last_states_that_are_the_same_for_every_request_are_stopped_without_logits_of_the_engine(
    honest: TransformersEngine, spec: TargetSpec, teacher: TeacherHead
) -> None:
    class Silent(SpoiledWhere):
        def probe_outputs(self, samples: Iterable[TokenizedSample]) -> list[ProbeOutput | Failure]:
            items = [i for i in self.engine.probe_outputs(samples) if isinstance(i, ProbeOutput)]
            same = [changed(i, last=torch.ones_like(i.states.last)) for i in items]
            return [dataclasses.replace(i, next_token=None) for i in same]

    with pytest.raises(ProbeError, match=r"probe, samples: .* end in the same last state"):
        run_probe(Silent(honest, lambda *_: False), spec, teacher)


def test_a_sample_that_is_lost_or_comes_twice_is_stopped(
    honest: TransformersEngine, spec: TargetSpec, teacher: TeacherHead
) -> None:
    class Losing(SpoiledWhere):
        def probe_outputs(self, samples: Iterable[TokenizedSample]) -> list[ProbeOutput | Failure]:
            items = self.engine.probe_outputs(samples)
            return [*items[:-1], items[0]] if len(items) > 1 else items

    with pytest.raises(ProbeError, match="probe: 5 samples went in, 5 came out"):
        run_probe(Losing(honest, lambda *_: False), spec, teacher)


@pytest.mark.parametrize("by", [1e-4, 1e-2])
def test_a_log_probability_that_is_not_the_teachers_is_stopped(
    honest: TransformersEngine, spec: TargetSpec, teacher: TeacherHead, by: float
) -> None:
    class Louder(SpoiledWhere):
        def probe_outputs(self, samples: Iterable[TokenizedSample]) -> list[ProbeOutput | Failure]:
            items = [i for i in self.engine.probe_outputs(samples) if isinstance(i, ProbeOutput)]
            return [dataclasses.replace(i, next_logprob=i.next_logprob + 2 * by) for i in items]

    engine = Louder(honest, lambda *_: False)
    if by < 1e-3:
        run_probe(engine, spec, teacher)
        return
    with pytest.raises(ProbeError, match="probe, teacher"):
        run_probe(engine, spec, teacher)


TOLERANCES = [("float32", 1e-3, 1e-3), ("float16", 2e-2, 0.1), ("bfloat16", 6e-2, 0.35)]


@pytest.mark.parametrize(("dtype", "typical", "worst"), TOLERANCES)
def test_the_median_row_and_the_worst_row_have_the_tolerances_of_the_type(
    spec: TargetSpec, dtype: str, typical: float, worst: float
) -> None:
    spec = dataclasses.replace(spec, dtype=dtype)
    known = {"a": torch.randn(50, 4, 64)}

    def moved(typical: float, worst: float) -> dict[str, torch.Tensor]:
        by = torch.full((50, 1, 1), typical)
        by[17] = worst
        return {"a": known["a"] * (1 + by)}

    compare_states(moved(0.9 * typical, 0.9 * worst), known, spec, "here and there")
    with pytest.raises(ProbeError, match="differ here and there"):
        compare_states(moved(0.0, 1.1 * worst), known, spec, "here and there")
    with pytest.raises(ProbeError, match="differ here and there"):
        compare_states(moved(1.1 * typical, 1.1 * typical), known, spec, "here and there")


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-2), ("float16", 0.1), ("bfloat16", 0.35)])
def test_a_log_probability_has_the_tolerance_of_the_type(
    honest: TransformersEngine, spec: TargetSpec, teacher: TeacherHead, dtype: str, tolerance: float
) -> None:
    (output,) = honest.probe_outputs(probe_samples(mixed_samples([120]))[:1])
    assert isinstance(output, ProbeOutput)
    spec = dataclasses.replace(spec, dtype=dtype)
    for share, is_refused in ((0.8, False), (1.3, True), (-0.8, False), (-1.3, True)):
        off = dataclasses.replace(output, next_logprob=output.next_logprob + share * tolerance)
        if is_refused:
            with pytest.raises(ProbeError, match="probe, teacher"):
                check_teacher(off, spec, teacher.logits)
        else:
            check_teacher(off, spec, teacher.logits)


def test_the_envelope_leaves_out_the_first_row_and_the_shortest_sample() -> None:
    """The first token's activations are hundreds of times larger; a sample of one token has no other row."""

    def rows(*norms: float) -> torch.Tensor:
        return torch.tensor(norms)[:, None, None] * torch.tensor([1.0, 0.0])

    states = [rows(500.0), rows(500.0, 3.0, 3.0), rows(500.0, 2.0, 7.0, 5.0)]
    assert envelope_of(states).tolist() == [[3.0, 5.0]]
    assert envelope_of([rows(4.0)]).tolist() == [[4.0, 4.0]], "where there is nothing else"


@pytest.mark.parametrize(("norm", "is_outside"), [(59.0, False), (61.0, True), (0.034, False), (0.033, True)])
def test_a_magnitude_thirty_times_that_of_the_probe_is_outside(norm: float, is_outside: bool) -> None:
    envelope = torch.tensor([[1.0, 2.0]])
    found = outside_envelope([torch.tensor([[900.0], [norm], [norm]])], envelope)
    assert (found == (0, 0)) == is_outside
