"""The seam that every engine in the registry keeps; a new engine is tested by its line in the table."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eyas.config.load import load_config
from eyas.engines.base import Prompt, Sampling
from eyas.engines.fake.engine import FakeEngine
from eyas.engines.info import engine_info, engines_that
from eyas.engines.transformers.engine import TransformersEngine
from eyas.errors import ContractError
from eyas.types import Completion, Failure, HiddenStates, TargetSpec, TokenizedSample
from tiny import make_target, random_samples, spec_of


def engine_param(name: str) -> Any:
    # vllm is many libraries, and their deprecations are not ours.
    return pytest.param(name, marks=pytest.mark.filterwarnings("ignore") if name == "vllm" else ())


COMPUTING = [info.name for info in engines_that(lambda info: info.captures and info.generates)]


@pytest.fixture(scope="module", params=[engine_param(name) for name in COMPUTING])
def engine(request: pytest.FixtureRequest, tiny_target: Path, tiny_spec: TargetSpec) -> Iterator[Any]:
    if request.param == "vllm":
        pytest.importorskip("vllm", reason="vllm is not installed")
    settings = ("run_dir=run", f"target.model={tiny_target}", "data.sources=[]")
    config = load_config(None, settings).config
    made = engine_info(request.param).start(config, tiny_target, tiny_spec, "cpu")
    yield made
    made.close()


def prompts(num: int) -> list[Prompt]:
    rng = np.random.default_rng(1)
    lengths = [3, 17, 8, 8, 1, 30, 12][:num]
    return [Prompt(f"p{i}", tuple(rng.integers(2, 300, n).tolist())) for i, n in enumerate(lengths)]


def test_capture_gives_one_item_for_each_sample(engine: Any, tiny_spec: TargetSpec) -> None:
    samples = random_samples(9, tiny_spec.vocab_size)
    items = list(engine.capture(iter(samples)))
    assert all(isinstance(i, HiddenStates) for i in items)
    assert sorted(i.sample.sample_id for i in items) == sorted(s.sample_id for s in samples)


def test_captured_states_have_the_layers_width_and_type_of_the_target(
    engine: Any, tiny_spec: TargetSpec
) -> None:
    for item in engine.capture(random_samples(5, tiny_spec.vocab_size)):
        num_rows = int(item.sample.supervised.sum())
        assert item.aux.shape == (len(item.sample), tiny_spec.num_aux_layers, tiny_spec.hidden_size)
        assert item.last.shape == (num_rows, tiny_spec.hidden_size)
        assert item.aux.dtype == item.last.dtype == torch.float32
        assert item.aux.device.type == "cpu"
        assert item.aux.isfinite().all()


def test_layers_differ_from_each_other_and_from_zero(engine: Any, tiny_spec: TargetSpec) -> None:
    (item,) = engine.capture(random_samples(1, tiny_spec.vocab_size))
    layers = list(item.aux.unbind(1))
    assert all(layer.abs().amax() > 0 for layer in layers)
    assert all(not torch.equal(a, b) for i, a in enumerate(layers) for b in layers[:i])


def test_states_do_not_depend_on_neighbours_in_the_batch(engine: Any, tiny_spec: TargetSpec) -> None:
    samples = random_samples(9, tiny_spec.vocab_size)
    together = {i.sample.sample_id: i for i in engine.capture(samples)}
    for sample in samples:
        (alone,) = engine.capture([sample])
        mixed = together[sample.sample_id]
        torch.testing.assert_close(alone.aux, mixed.aux, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(alone.last, mixed.last, rtol=1e-4, atol=1e-4)


def test_nothing_in_nothing_out(engine: Any) -> None:
    assert list(engine.capture([])) == []
    assert list(engine.generate([], Sampling(4))) == []


def test_generate_gives_one_answer_for_each_prompt_within_the_limit(
    engine: Any, tiny_spec: TargetSpec
) -> None:
    asked = prompts(7)
    answers = {a.prompt_id: a for a in engine.generate(iter(asked), Sampling(12))}
    assert sorted(answers) == sorted(p.prompt_id for p in asked)
    for answer in answers.values():
        assert isinstance(answer, Completion)
        assert 1 <= len(answer.token_ids) <= 12
        stopped = answer.token_ids[-1] in tiny_spec.eos_token_ids
        assert answer.finish_reason == ("stop" if stopped else "length")
        assert stopped or len(answer.token_ids) == 12
        assert not set(answer.token_ids[:-1]) & set(tiny_spec.eos_token_ids)


def test_one_token_is_an_answer(engine: Any) -> None:
    assert [len(a.token_ids) for a in engine.generate(prompts(3), Sampling(1))] == [1, 1, 1]


def test_a_failure_is_a_value_that_names_its_sample(tiny_spec: TargetSpec) -> None:
    engine = FakeEngine(None, tiny_spec, fails=frozenset({"sample-1", "p0"}))
    items = list(engine.capture(random_samples(3, tiny_spec.vocab_size)))
    assert len(items) == 3
    assert [i.sample_id for i in items if isinstance(i, Failure)] == ["sample-1"]
    answers = list(engine.generate(prompts(2), Sampling(3)))
    assert [isinstance(a, Failure) for a in answers] == [True, False]


# The reference engine, held to transformers itself.

FAMILIES = [
    ("llama", {}),
    ("llama", {"tied": True}),
    ("mistral", {}),
    ("qwen2", {}),
    ("qwen3", {"tied": True}),
]


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda f: f[0] + ("-tied" if f[1] else ""))
def family_target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model_type, settings = request.param
    return make_target(tmp_path_factory.mktemp("family") / "model", model_type=model_type, **settings)


def open_engine(folder: Path, aux_layer_ids: tuple[int, ...]) -> Any:
    spec = spec_of(folder, aux_layer_ids)
    return TransformersEngine(folder, spec, batch_tokens=64)


@torch.inference_mode()
def test_every_layer_id_is_transformers_own_hidden_state(family_target: Path) -> None:
    every = tuple(range(7))
    engine = open_engine(family_target, every)
    norm = engine.model.get_decoder().norm
    samples = random_samples(6, 300)
    for item in engine.capture(samples):
        ids = torch.from_numpy(item.sample.input_ids).long()[None]
        theirs = engine.model(input_ids=ids, output_hidden_states=True).hidden_states
        assert len(theirs) == 7
        for layer_id in range(6):
            torch.testing.assert_close(item.aux[:, layer_id], theirs[layer_id][0], rtol=1e-5, atol=1e-5)
        # Their last entry is taken after the final norm; ours is before it.
        torch.testing.assert_close(norm(item.aux[:, 6]), theirs[6][0], rtol=1e-5, atol=1e-5)
        assert (item.aux[:, 6] - theirs[6][0]).abs().max() > 0.1
        supervised = torch.from_numpy(item.sample.supervised)
        assert torch.equal(item.last, item.aux[supervised, 6])


@torch.inference_mode()
def test_the_teacher_rebuilt_from_stored_states_is_the_model(family_target: Path) -> None:
    from eyas.targets.teacher import read_teacher

    engine = open_engine(family_target, (1, 2))
    teacher = read_teacher(family_target, engine.spec)
    for item in engine.capture(random_samples(6, 300)):
        ids = torch.from_numpy(item.sample.input_ids).long()[None]
        logits = engine.model(input_ids=ids).logits[0, torch.from_numpy(item.sample.supervised)]
        torch.testing.assert_close(teacher.logits(item.last), logits, rtol=1e-5, atol=1e-4)


def test_no_state_of_a_padding_row_is_stored(tiny_engine: Any, tiny_spec: TargetSpec) -> None:
    short = TokenizedSample("short", np.array([5, 6, 7], np.int32), np.array([False, True, True]))
    long = TokenizedSample("long", np.arange(2, 32, dtype=np.int32), np.arange(30) > 2)
    items = {i.sample.sample_id: i for i in tiny_engine.capture([long, short])}
    assert items["short"].aux.shape[0] == 3
    assert items["short"].last.shape[0] == 1
    # A view of the padded batch would keep all of it in memory.
    kept = {
        s.untyped_storage().data_ptr(): s.untyped_storage().nbytes() for s in (i.aux for i in items.values())
    }
    assert sum(kept.values()) == sum(i.aux.nbytes for i in items.values())


def test_a_batch_stays_within_its_tokens_padding_included(tiny_engine: Any) -> None:
    shapes: list[torch.Size] = []
    samples = random_samples(50, 300, longest=60)
    handle = tiny_engine.model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    try:
        assert len(list(tiny_engine.capture(samples))) == 50
    finally:
        handle.remove()
    assert sum(shape[0] for shape in shapes) == 50
    assert all(shape.numel() <= tiny_engine.batch_tokens for shape in shapes)
    # Sorted by length, batches hold little padding.
    assert sum(shape.numel() for shape in shapes) <= 1.25 * sum(len(s) for s in samples)


def test_batched_greedy_answers_are_those_given_one_by_one(tiny_engine: Any) -> None:
    asked = prompts(7)
    together = {a.prompt_id: a for a in tiny_engine.generate(asked, Sampling(40))}
    alone = {p.prompt_id: a for p in asked for a in tiny_engine.generate([p], Sampling(40))}
    assert together == alone
    assert {a.finish_reason for a in alone.values()} == {"stop", "length"}


@torch.inference_mode()
def test_greedy_answers_are_the_models_argmax(tiny_engine: Any) -> None:
    for prompt in prompts(4):
        (answer,) = tiny_engine.generate([prompt], Sampling(20))
        ids = torch.tensor([[*prompt.token_ids, *answer.token_ids]])
        chosen = tiny_engine.model(input_ids=ids).logits[0].argmax(-1).tolist()
        start = len(prompt.token_ids) - 1
        assert list(answer.token_ids) == chosen[start : start + len(answer.token_ids)]


def test_sampled_answers_depend_on_the_seed_and_not_on_the_batch(tiny_engine: Any) -> None:
    asked = prompts(5)
    warm = Sampling(10, temperature=1.0, seed=3)
    together = {a.prompt_id: a for a in tiny_engine.generate(asked, warm)}
    alone = {p.prompt_id: a for p in asked for a in tiny_engine.generate([p], warm)}
    other = {a.prompt_id: a for a in tiny_engine.generate(asked, Sampling(10, 1.0, seed=4))}
    assert together == alone
    assert other != together


@pytest.fixture(scope="module")
def window_engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A target whose layers see no further back than eight tokens."""
    folder = tmp_path_factory.mktemp("window") / "model"
    return open_engine(make_target(folder, model_type="mistral", sliding_window=8), (2, 4, 5))


@torch.inference_mode()
def test_greedy_answers_of_a_sliding_window_are_the_models_argmax(window_engine: Any) -> None:
    for answer in window_engine.generate(prompts(7), Sampling(20)):
        (prompt,) = (p for p in prompts(7) if p.prompt_id == answer.prompt_id)
        ids = torch.tensor([[*prompt.token_ids, *answer.token_ids]])
        chosen = window_engine.model(input_ids=ids).logits[0].argmax(-1).tolist()
        start = len(prompt.token_ids) - 1
        assert list(answer.token_ids) == chosen[start : start + len(answer.token_ids)]


@pytest.mark.parametrize("name", ["tiny_engine", "window_engine"])
@torch.inference_mode()
def test_a_session_gives_the_logits_and_states_of_a_full_forward(
    request: pytest.FixtureRequest, name: str
) -> None:
    engine = request.getfixturevalue(name)
    ids = list(range(10, 40))
    session = engine.session()
    first, of_prompt = session.extend(ids[:17], num_logits=1)
    assert len(of_prompt) == 17
    session.extend([250, 251, 252])  # a proposal that is refused
    session.truncate(17)
    logits, aux = session.extend(ids[17:])
    out = engine.model(input_ids=torch.tensor([ids]), output_hidden_states=True)
    torch.testing.assert_close(first, out.logits[0, 16:17], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits, out.logits[0, 17:], rtol=1e-4, atol=1e-4)
    for place, layer_id in enumerate(engine.spec.aux_layer_ids):
        torch.testing.assert_close(aux[:, place], out.hidden_states[layer_id][0, 17:], rtol=1e-4, atol=1e-4)


def test_a_session_forgets_only_what_it_has(tiny_engine: Any) -> None:
    session = tiny_engine.session()
    session.extend([5, 6, 7])
    with pytest.raises(ContractError, match="fewer are cached"):
        session.truncate(4)
