"""The real vLLM, in this process: every row is the right one, whatever the scheduler does."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_cases import (
    NUM_LAYERS,
    make_model,
    mixed_samples,
    reference_states,
    sample_of,
    skip_where_refused,
    spec_of_model,
    states_by_id,
    worst_difference,
)

pytest.importorskip("vllm", reason="vllm is not installed")

from eyas.config.schema import VllmSettings
from eyas.engines.base import ProbeOutput, Prompt, Sampling
from eyas.engines.transformers.engine import TransformersEngine
from eyas.engines.vllm import state_transfer as staging
from eyas.engines.vllm.engine import VllmEngine
from eyas.engines.vllm.state_transfer import layer_digests
from eyas.engines.vllm.versions import CPU_CACHE_SIZED, installed_version
from eyas.types import Completion, Failure, HiddenStates

# vLLM warns of much that is not ours.
pytestmark = pytest.mark.filterwarnings("ignore")

AUX = tuple(range(NUM_LAYERS))
# From one token to several chunks of 64, and more requests than the four slots.
LENGTHS = [1, 2, 7, 33, 64, 65, 100, 200, 255, 256, 31, 5]
EXACT, BF16 = 1e-5, 4e-2


class Engines:
    """vLLM in this process, one at a time: a start takes seconds, so the same one is used while it does."""

    def __init__(self) -> None:
        self.key: Any = None
        self.engine: VllmEngine | None = None

    def __call__(self, folder: Path, dtype: str = "float32", **settings: Any) -> VllmEngine:
        key = (folder, dtype, tuple(sorted(settings.items())))
        if key != self.key or self.engine is None:
            self.close()
            spec = spec_of_model(folder, AUX, dtype)
            options = VllmSettings(**settings)
            skip_where_refused(options.capture, spec)
            self.key = key
            self.engine = VllmEngine(
                folder, spec, settings=options, batch_tokens=64, batch_size=4, in_process=True
            )
        return self.engine

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
        self.engine = None


@pytest.fixture(scope="module")
def make() -> Iterator[Engines]:
    engines = Engines()
    yield engines
    engines.close()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.mark.parametrize("capture", ["native", "worker"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_every_layer_from_0_to_n_equals_transformers(
    tmp_path: Path, make: Engines, model_type: str, capture: str
) -> None:
    folder = make_model(tmp_path / model_type, model_type)
    engine = make(folder, capture=capture)
    samples = mixed_samples(LENGTHS)
    found = states_by_id(engine.capture(samples))
    assert worst_difference(found, reference_states(folder, engine.spec, samples)) < EXACT


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", BF16), ("float32", EXACT)])
def test_native_and_hooked_states_are_equal_bit_for_bit(
    llama: Path, make: Engines, dtype: str, tolerance: float
) -> None:
    samples, alone = mixed_samples(LENGTHS), sample_of("alone", range(3, 40))
    native, hooked = (
        states_by_id([*engine.capture(samples), *engine.capture([alone])])
        for engine in (make(llama, dtype, capture=capture) for capture in ("worker", "native"))
    )
    known = reference_states(llama, spec_of_model(llama, AUX, dtype), [*samples, alone])
    assert worst_difference(hooked, known) < tolerance
    # In a mixed batch the two engines may have batched differently; alone they did the same sums.
    assert worst_difference(hooked, native) < tolerance
    assert torch.equal(native["alone"], hooked["alone"])


def test_a_prompt_given_twice_and_prefixes_of_it_get_their_own_rows(llama: Path, make: Engines) -> None:
    ids = mixed_samples([150], seed=5)[0].input_ids
    samples = [sample_of(f"copy-{i}", ids) for i in range(5)]
    samples += [sample_of(f"prefix-{n}", ids[:n]) for n in (1, 16, 64, 65, 149)]
    known = reference_states(llama, spec_of_model(llama, AUX), samples)
    for further in ((), ("enable_prefix_caching=true",)):
        engine = make(llama, capture="native", engine_args=further)
        # Twice, so that with prefix caching on the second time finds everything cached.
        for _ in range(2):
            assert worst_difference(states_by_id(engine.capture(samples)), known) < EXACT


def test_hooks_refuse_rows_that_came_from_a_prefix_cache(llama: Path, make: Engines) -> None:
    engine = make(llama, capture="worker", engine_args=("enable_prefix_caching=true",))
    sample = mixed_samples([200])[0]
    states_by_id(engine.capture([sample]))
    (item,) = engine.capture([sample])
    assert isinstance(item, Failure)
    assert "rows were never computed (prefix caching?)" in item.reason


@pytest.mark.parametrize(("capture", "kv_cache_bytes"), [("native", 4_500_000), ("worker", 1_500_000)])
def test_a_forced_preemption_changes_no_row(
    llama: Path, make: Engines, capture: str, kv_cache_bytes: int
) -> None:
    from vllm.engine.arg_utils import EngineArgs

    if installed_version() < CPU_CACHE_SIZED:
        pytest.skip("the cache of this CPU build cannot be small enough")
    # Samples are admitted before their whole prompt has room, and go forward side by side.
    further = ["long_prefill_token_threshold=16"]
    if hasattr(EngineArgs, "scheduler_reserve_full_isl"):
        further.append("scheduler_reserve_full_isl=false")
    # Room for fewer than the four samples that are served at a time: some must give way.
    engine = make(llama, capture=capture, kv_cache_bytes=kv_cache_bytes, engine_args=tuple(further))
    scheduler = engine._capturing().engine.engine_core.engine_core.scheduler
    preempted, preempt = [], scheduler._preempt_request

    def counted(request: Any, *args: Any, **kwargs: Any) -> None:
        preempted.append(request.request_id)
        preempt(request, *args, **kwargs)

    scheduler._preempt_request = counted
    samples = mixed_samples([250, 240, 230, 220, 210, 200, 190, 250])
    found = states_by_id(engine.capture(samples))
    assert worst_difference(found, reference_states(llama, engine.spec, samples)) < EXACT
    assert preempted


@pytest.mark.parametrize("capture", ["native", "worker"])
def test_an_aborted_request_leaves_nothing_and_harms_nobody(llama: Path, make: Engines, capture: str) -> None:
    engine = make(llama, capture=capture)
    samples = mixed_samples([256] * 6)
    items = engine.capture(samples)
    next(items)
    items.close()  # the others are aborted, some in the middle of their prompt
    assert engine._session is not None
    after = mixed_samples([130, 90, 64], seed=9)
    found = states_by_id(engine.capture(after))
    assert worst_difference(found, reference_states(llama, engine.spec, after)) < EXACT


def test_warm_up_batches_between_chunks_never_reach_the_data(llama: Path, make: Engines) -> None:
    engine = make(llama, capture="worker")
    samples = mixed_samples([200, 130])
    session = engine._capturing()
    executor = session.engine.model_executor
    if not hasattr(executor, "driver_worker"):
        pytest.skip("the worker of this vLLM is always a process of its own")
    runner = executor.driver_worker.worker.model_runner
    step = session.step

    def step_and_warm_up() -> list[Any]:
        runner._dummy_run(64)
        out = step()
        runner._dummy_run(32)
        return out

    session.step = step_and_warm_up  # type: ignore[method-assign]
    found = states_by_id(engine.capture(samples))
    assert worst_difference(found, reference_states(llama, engine.spec, samples)) < EXACT


@pytest.mark.parametrize("capture", ["native", "worker"])
def test_a_witness_carries_the_engines_own_next_token(llama: Path, make: Engines, capture: str) -> None:
    engine = make(llama, capture=capture)
    samples = mixed_samples([40, 9, 70])
    reference = TransformersEngine(llama, engine.spec)
    known = {
        w.states.sample.sample_id: w for w in reference.probe_outputs(samples) if isinstance(w, ProbeOutput)
    }
    for output in engine.probe_outputs(samples):
        assert isinstance(output, ProbeOutput)
        other = known[output.states.sample.sample_id]
        assert output.next_token == other.next_token
        assert output.next_logprob == pytest.approx(other.next_logprob, abs=1e-4)
        full = torch.cat([output.states.aux, output.states.last[:, None]], dim=1)
        assert output.rank_digests == (layer_digests(full),)


def test_a_failed_write_is_a_failure_with_its_reason(
    llama: Path, make: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    for capture in ("native", "worker"):
        engine = make(llama, capture=capture)
        engine._capturing()
        with monkeypatch.context() as patch:
            patch.setattr(staging, "write_states", full_disk)
            items = list(engine.capture(mixed_samples([20])))
        assert [item.reason for item in items if isinstance(item, Failure)] == [
            "the worker could not hand over the states: OSError: [Errno 28] No space left on device"
        ]
        assert list(states_by_id(engine.capture(mixed_samples([20])))) == ["s0"]


def test_nothing_stays_in_staging_but_files_to_write_over(
    llama: Path, make: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_MIN_SPARE", 1)
    engine = make(llama)
    session = engine._capturing()
    list(engine.capture(mixed_samples(LENGTHS)))
    engine.probe_outputs(mixed_samples([5]))
    gc.collect()
    assert [f.name for f in session.staging.iterdir()] == ["spare"]
    assert 0 < len(list((session.staging / "spare").iterdir())) <= len(LENGTHS)
    engine.close()
    assert not session.staging.exists()


def test_a_small_staging_limit_holds_samples_back(llama: Path, make: Engines) -> None:
    engine = make(llama, staging_bytes=300 * 5 * 128 * 4)  # 300 tokens
    session = engine._capturing()
    most, submit = 0, engine._submit
    open_tokens: dict[str, int] = {}

    def counted(session: Any, sample: Any, output: bool) -> str:
        nonlocal most
        open_tokens[sample.sample_id] = len(sample)
        most = max(most, sum(open_tokens.values()))
        return submit(session, sample, output)

    engine._submit = counted  # type: ignore[method-assign]
    for item in engine.capture(mixed_samples(LENGTHS)):
        assert isinstance(item, HiddenStates)
        del open_tokens[item.sample.sample_id]
    assert session is engine._session
    assert 256 <= most <= 300 + 256


def test_greedy_answers_equal_transformers_and_end_alike(llama: Path, make: Engines) -> None:
    engine = make(llama)
    prompts = [
        Prompt(f"p{i}", tuple(s.input_ids.tolist())) for i, s in enumerate(mixed_samples([1, 5, 20, 9, 33]))
    ]
    reference = TransformersEngine(llama, engine.spec)
    known = {c.prompt_id: c for c in reference.generate(prompts, Sampling(24))}
    found = {c.prompt_id: c for c in engine.generate(prompts, Sampling(24))}
    assert found == known


def test_sampled_answers_do_not_depend_on_their_neighbours(llama: Path, make: Engines) -> None:
    engine = make(llama)
    prompts = [Prompt(f"p{i}", tuple(s.input_ids.tolist())) for i, s in enumerate(mixed_samples([5, 20, 9]))]
    sampling = Sampling(12, temperature=1.0, seed=3)
    together = {c.prompt_id: c for c in engine.generate(prompts, sampling)}
    for prompt in prompts:
        assert list(engine.generate([prompt], sampling)) == [together[prompt.prompt_id]]
    other = {c.prompt_id: c for c in engine.generate(prompts, Sampling(12, temperature=1.0, seed=4))}
    assert other != together


def test_the_environment_is_as_it_was_after_a_start(llama: Path, make: Engines) -> None:
    before = dict(os.environ)
    make(llama)._capturing()
    changed = {k for k in before.keys() | os.environ.keys() if before.get(k) != os.environ.get(k)}
    assert not [
        k
        for k in changed
        if k.startswith("VLLM_") and k in ("VLLM_LOGGING_LEVEL", "VLLM_USE_V2_MODEL_RUNNER")
    ]


def test_one_start_answers_and_captures_by_turns(llama: Path, make: Engines) -> None:
    prompts = [Prompt(f"p{n}", tuple(range(3, 3 + n))) for n in (3, 40, 90)]
    sampling = Sampling(max_new_tokens=12)
    alone = {c.prompt_id: c for c in make(llama).generate(prompts, sampling) if isinstance(c, Completion)}
    make.close()
    spec = spec_of_model(llama, AUX)
    engine = VllmEngine(llama, spec, batch_tokens=64, batch_size=4, answers=True, in_process=True)
    samples = mixed_samples(LENGTHS)
    try:
        sessions = set()
        for _turn in range(2):
            found = {c.prompt_id: c for c in engine.generate(prompts, sampling) if isinstance(c, Completion)}
            assert found == alone
            sessions.add(id(engine._session))
            states = states_by_id(engine.capture(samples))
            assert worst_difference(states, reference_states(llama, spec, samples)) < EXACT
            sessions.add(id(engine._session))
        assert len(sessions) == 1
    finally:
        engine.close()
