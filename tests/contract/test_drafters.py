"""Every kind of draft keeps the contract of ``eyas.drafters.base``, a toy outside of eyas too."""

import dataclasses
import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import toy_drafter
from eyas import registry
from eyas.config.schema import TrainSettings, draft_settings_of
from eyas.data.pack import pack
from eyas.drafters.common.acceptance import Acceptance
from eyas.drafters.common.batch import pack_batch
from eyas.engines.base import TargetSession
from eyas.errors import UserError
from eyas.evaluate.acceptance import predict_acceptance
from eyas.evaluate.decode import decode_speculative
from eyas.export.native import NativeExporter, load_export
from eyas.export.read import read_draft
from eyas.store.aux_subset import with_layers
from eyas.targets.teacher import read_teacher
from eyas.train.checkpoint import latest_checkpoint
from eyas.train.loop import Trainer
from eyas.train.step_plan import StepPlan
from eyas.types import HiddenStates, VocabMap
from memory_store import MemoryStore
from pipeline import eyas, write_run
from tiny import answered_states, spec_of

ROOT = Path(__file__).parents[2]
KINDS = [*registry.DRAFTERS, "toy"]
CPU, LIMIT, K = torch.device("cpu"), 20, 3


@pytest.fixture(autouse=True)
def _toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.DRAFTERS, "toy", "toy_drafter")


@pytest.fixture(scope="module")
def states(tiny_engine: Any) -> list[HiddenStates]:
    return answered_states(tiny_engine, 16, LIMIT)


def new_trainer(kind: str, root: Path, target: Path, states: list[HiddenStates], **train: Any) -> Trainer:
    """Return a trainer as the train stage makes it, with the kind's defaults on all captured layers."""
    root.mkdir(parents=True, exist_ok=True)
    drafter, settings = registry.drafter(kind), draft_settings_of(kind)(architecture=kind)
    store = MemoryStore(spec_of(target), states)
    teacher = read_teacher(target, store.spec).to("cpu", torch.float32)
    vocab = VocabMap(torch.arange(0, store.spec.vocab_size, 2).numpy(), store.spec.vocab_size)
    draft = drafter.build(drafter.config_for(store.spec, settings, len(vocab)))
    drafter.initialise(draft, target, teacher, store.spec, vocab, seed=0)
    defaults: dict[str, Any] = {"batch_tokens": 128, "num_epochs": 4, "learning_rate": 5e-3, "save_every": 3}
    return Trainer(
        drafter=drafter,
        draft=draft,
        draft_settings=settings,
        teacher=teacher,
        vocab=vocab,
        train_states=store,
        held_out_states=MemoryStore(store.spec, states[:4]),
        settings=TrainSettings(**(defaults | train)),
        seed=0,
        root=root,
        device=CPU,
    )


@pytest.fixture(scope="module")
def trained(
    tiny_target: Path, states: list[HiddenStates], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Trainer]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry.DRAFTERS, "toy", "toy_drafter")
        trainers = {}
        for kind in KINDS:
            trainers[kind] = new_trainer(kind, tmp_path_factory.mktemp(kind), tiny_target, states)
            trainers[kind].run()
        yield trainers


@pytest.mark.parametrize("kind", KINDS)
def test_a_shape_comes_back_from_json(kind: str, trained: dict[str, Trainer]) -> None:
    config = trained[kind].draft.config
    again = registry.drafter(kind).config_from_json(json.loads(json.dumps(config.to_json())))
    assert again == config
    parameters = registry.drafter(kind).build(again).trainable()
    assert {n: p.shape for n, p in parameters.items()} == {
        n: p.shape for n, p in trained[kind].draft.trainable().items()
    }


@pytest.mark.parametrize("kind", KINDS)
def test_heads_and_tables_are_parameters_of_the_draft(kind: str, trained: dict[str, Trainer]) -> None:
    drafter, draft = registry.drafter(kind), trained[kind].draft
    names = set(dict(draft.named_parameters()))
    assert drafter.heads | drafter.tables <= names
    assert drafter.heads <= set(draft.trainable())


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_names_all_its_tensors_and_follows_from_its_draw(kind: str) -> None:
    drafter, settings = registry.drafter(kind), draft_settings_of(kind)(architecture=kind)
    supervised = torch.rand(60, generator=torch.Generator().manual_seed(1)) < 0.8
    documents = torch.arange(60) // 20
    plan = drafter.plan(supervised, documents, settings, draw=7)
    again = drafter.plan(supervised, documents, settings, draw=7)
    # A position may be judged in several blocks, the largest of which hold 15 predictions.
    assert 0 < plan.num_supervised <= 15 * int(supervised.sum())
    assert all(torch.equal(a, b) for a, b in zip(plan.tensors(), again.tensors(), strict=True))
    moved: list[torch.Tensor] = []
    changed = plan.each(lambda tensor: moved.append(tensor) or tensor.clone())  # type: ignore[func-returns-value]
    assert {id(t) for t in moved} == {id(t) for t in plan.tensors()}
    assert changed.num_supervised == plan.num_supervised


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_finite_and_the_sums_are_those_of_a_measurement(
    kind: str, tiny_target: Path, states: list[HiddenStates], tmp_path: Path
) -> None:
    trainer = new_trainer(kind, tmp_path, tiny_target, states)
    planner = partial(trainer.drafter.plan, settings=trainer.draft_settings, draw=3)
    batch = pack_batch(states[:6], planner, CPU, torch.float32)
    objective = trainer.objective
    objective.start()
    objective.expect_last()
    sums = objective.backward(batch)
    objective.finish()
    assert sums.dtype == torch.float64
    assert len(sums) == objective.num_sums
    assert sums[-1] == batch.num_supervised
    for name, parameter in trainer.draft.trainable().items():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().max() > 0, name
    measured, rounds = objective.measure(batch, K)
    assert measured.tolist() == pytest.approx(sums.tolist())
    assert objective.ratios(sums.tolist())["loss"] == pytest.approx(float(sums[0] / sums[-1]))
    assert (rounds.accepted <= rounds.depth).all()
    assert (rounds.rows[1:] > rounds.rows[:-1]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_replay_is_decoding_on_every_prompt(
    kind: str, tiny_engine: Any, trained: dict[str, Trainer], states: list[HiddenStates]
) -> None:
    trainer = trained[kind]
    parts = (trainer.drafter, trainer.draft, trainer.teacher, trainer.target_ids, trainer.train_states)
    predicted = predict_acceptance(*parts, range(len(states)), K, LIMIT)
    total = Acceptance.empty(K)
    for item, expected in zip(states, predicted, strict=True):
        sample = item.sample
        prompt = sample.input_ids[: int(sample.loss_mask.argmax())].tolist()
        session: TargetSession = tiny_engine.session()
        proposer = trainer.drafter.proposer(trainer.draft, trainer.target_ids)
        found = decode_speculative(session, proposer, prompt, K, LIMIT, tiny_engine.spec.eos_token_ids)
        assert found.token_ids == sample.input_ids[len(prompt) :].tolist()
        assert found.acceptance == expected
        total += expected
    assert total.length > 1.1, "the draft should have learned enough for the comparison to mean something"


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_is_verified_and_read_as_its_kind(
    kind: str, trained: dict[str, Trainer], states: list[HiddenStates], tmp_path: Path
) -> None:
    trainer, spec = trained[kind], trained[kind].train_states.spec
    exporter = NativeExporter(kind)
    exporter.write(tmp_path, trainer.draft, spec, trainer.vocab)
    tokens = torch.from_numpy(states[0].sample.input_ids[1:]).long()
    exporter.verify(tmp_path, trainer.draft, trainer.vocab, states[0].aux[: len(tokens)], tokens)
    stored = read_draft(tmp_path)
    assert (stored.architecture, stored.aux_layer_ids) == (kind, spec.aux_layer_ids)
    draft, _, _ = load_export(tmp_path, trainer.teacher.embedding)
    expected = trainer.draft.trainable()
    assert all(torch.equal(p, expected[n]) for n, p in draft.trainable().items())


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_training_ends_with_the_same_bits(
    kind: str, tiny_target: Path, states: list[HiddenStates], tmp_path: Path
) -> None:
    whole = new_trainer(kind, tmp_path / "whole", tiny_target, states, num_epochs=2)
    whole.run()
    new_trainer(kind, tmp_path / "halted", tiny_target, states, num_epochs=2).run(stop_after=2)
    again = new_trainer(kind, tmp_path / "halted", tiny_target, states, num_epochs=2)
    again.run()
    assert again.history == whole.history
    kept = [latest_checkpoint(tmp_path / name) for name in ("whole", "halted")]
    for file in ("draft.safetensors", "optimizer.safetensors"):
        one, other = (load_file(folder / file) for folder in kept if folder)
        assert all(torch.equal(one[n], other[n]) for n in one.keys() | other.keys())


def test_every_batch_of_every_epoch_has_another_draw_and_ranks_agree_on_it(
    states: list[HiddenStates], tiny_target: Path
) -> None:
    store = MemoryStore(spec_of(tiny_target), states)
    settings = TrainSettings(num_epochs=3, batch_tokens=64, batches_per_step=2)
    cost_of = lambda supervised: float(supervised.sum())  # noqa: E731
    alone, shared = (StepPlan.of(store, cost_of, settings, 0, ranks) for ranks in (1, 2))
    draws = [batch.draw for step in alone.steps for batch in step]
    assert len(set(draws)) == len(draws) == 3 * len(pack(store.lengths, 64, 0))
    assert shared.steps == alone.steps
    for step, shares in zip(shared.steps, shared.shares, strict=True):
        assert sorted(b.draw for share in shares for b in share) == sorted(b.draw for b in step)
    other = StepPlan.of(store, cost_of, settings, 1, 1)
    assert not {b.draw for step in other.steps for b in step} & set(draws)


def test_a_draft_reads_a_subset_of_the_captured_layers(tiny_target: Path, states: list[HiddenStates]) -> None:
    store = MemoryStore(spec_of(tiny_target), states)
    ids = store.spec.aux_layer_ids
    assert with_layers(store, ids) is store
    some = with_layers(store, ids[1:])
    assert some.spec == dataclasses.replace(store.spec, aux_layer_ids=ids[1:])
    assert torch.equal(some.read(2).aux, store.read(2).aux[:, 1:])
    assert some.fingerprint != store.fingerprint
    with pytest.raises(UserError, match=r"\[6\] were not captured") as refused:
        with_layers(store, (ids[0], 6))
    assert "eyas extract" in str(refused.value.hint)


def test_a_toy_goes_from_prepare_to_evaluate(tmp_path: Path, tiny_target: Path) -> None:
    run_file = write_run(tmp_path, tiny_target, draft={"architecture": "toy", "num_tokens": 3})
    screen = eyas("run", "-c", run_file, "target.aux_layer_ids=[1,3,6]")
    assert screen.code == 0, screen.err
    assert "the draft reads layers [1, 6] of those that are captured, [1, 3, 6]" in screen.err
    report = json.loads((tmp_path / "run" / "evaluation" / "report.json").read_text())
    assert report["identical"] == report["num_prompts"]
    assert report["predicted"] == report["acceptance"]
    card = (tmp_path / "run" / "draft" / "README.md").read_text()
    assert "# Toy draft for" in card
    assert read_draft(tmp_path / "run" / "draft").aux_layer_ids == (1, 6)


def test_a_kind_that_no_engine_serves_is_refused_before_a_run(tmp_path: Path, tiny_target: Path) -> None:
    run_file = write_run(tmp_path, tiny_target, draft={"architecture": "toy"}, evaluate={"engine": "vllm"})
    screen = eyas("run", "-c", run_file)
    assert screen.code == 2
    assert "vLLM" in screen.err.splitlines()[-2]
    screen = eyas("run", "-c", run_file, "evaluate.engine=transformers", "draft.ttt_steps=3")
    assert "draft.ttt_steps is not a setting of draft.architecture=toy" in screen.err


def test_an_installed_package_brings_a_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "toys-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toys\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[eyas.drafters]\ntoy = toy_drafter\n")
    monkeypatch.delitem(registry.DRAFTERS, "toy")
    with pytest.raises(UserError, match="unknown draft architecture 'toy'"):
        registry.drafter("toy")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert registry.drafters()["toy"] == "toy_drafter"
    assert registry.drafter("toy").title == "Toy"


def test_the_toy_has_the_files_that_the_guide_lists() -> None:
    page = (ROOT / "docs" / "extending.md").read_text()
    section = page.split("## A kind of draft", 1)[1].split("\n## ", 1)[0]
    listed = {
        line.split("`")[1]: "optional" in line for line in section.splitlines() if line.startswith("| `")
    }
    folder = Path(toy_drafter.__file__).parent
    files = {path.name for path in folder.glob("*.py")} - {"__init__.py"}
    assert files == {name for name, optional in listed.items() if not optional}
