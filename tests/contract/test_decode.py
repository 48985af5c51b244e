"""Speculative decoding changes the speed and never the text, and the prediction is what decoding does."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.drafters.common.acceptance import Acceptance
from eyas.drafters.eagle3.config import draft_config_for
from eyas.drafters.eagle3.model import Eagle3Draft
from eyas.drafters.eagle3.propose import DraftChain
from eyas.evaluate.acceptance import predict_acceptance, predict_rounds
from eyas.evaluate.decode import Decoded, decode_plain, decode_speculative
from eyas.evaluate.lossless import first_difference, is_near_tie, near_tie
from eyas.train.loop import Trainer
from eyas.types import HiddenStates, TokenizedSample
from memory_store import MemoryStore
from tiny import answered_states, make_trainer

LIMIT = 30


class Scripted:
    """A draft chain that proposes from a script: the known continuation, or anything but it."""

    def __init__(self, answer: Sequence[int], wrong: int = 0) -> None:
        self.answer = answer
        self.wrong = wrong
        self.known = 0

    def propose(self, aux: torch.Tensor, following: Sequence[int], num_draft_tokens: int) -> list[int]:
        # The first call carries the whole prompt; each later one exactly the new tokens.
        self.known += len(following) if self.known else 1
        ahead = list(self.answer[self.known : self.known + num_draft_tokens])
        ahead += [0] * (num_draft_tokens - len(ahead))
        return [(token + self.wrong) % 300 for token in ahead]


def prompt_of(states: HiddenStates) -> list[int]:
    sample = states.sample
    return sample.input_ids[: sample.loss_mask.argmax()].tolist()


def plain(engine: Any, prompt: Sequence[int], limit: int = LIMIT) -> Decoded:
    return decode_plain(engine.session(), prompt, limit, engine.spec.eos_token_ids)


def speculative(engine: Any, chain: Any, prompt: Sequence[int], k: int, limit: int = LIMIT) -> Decoded:
    return decode_speculative(engine.session(), chain, prompt, k, limit, engine.spec.eos_token_ids)


@pytest.fixture(scope="module")
def states(tiny_engine: Any) -> list[HiddenStates]:
    return answered_states(tiny_engine, 24, LIMIT)


@pytest.fixture(scope="module")
def trained(
    tiny_target: Path, states: list[HiddenStates], tmp_path_factory: pytest.TempPathFactory
) -> Trainer:
    """A draft that knows these answers well enough to have some of its tokens accepted."""
    root = tmp_path_factory.mktemp("trained")
    trainer = make_trainer(
        root, tiny_target, states, states[:4], num_epochs=30, learning_rate=1e-2, max_grad_norm=5.0
    )
    trainer.run()
    return trainer


def test_plain_decoding_is_the_engines_own_greedy_answer(
    tiny_engine: Any, states: list[HiddenStates]
) -> None:
    for item in states:
        prompt = prompt_of(item)
        assert plain(tiny_engine, prompt).token_ids == item.sample.input_ids[len(prompt) :].tolist()


@pytest.mark.parametrize("k", [1, 3, 5])
def test_an_oracle_has_everything_accepted(tiny_engine: Any, states: list[HiddenStates], k: int) -> None:
    for item in states[:8]:
        prompt = prompt_of(item)
        answer = plain(tiny_engine, prompt)
        found = speculative(tiny_engine, Scripted(answer.token_ids), prompt, k)
        assert found.token_ids == answer.token_ids
        assert found.acceptance is not None
        # The first token is prefill's; each round gives k + 1 tokens, the last one what is left.
        assert found.acceptance.num_rounds == -(-(len(answer.token_ids) - 1) // (k + 1))


@pytest.mark.parametrize("k", [1, 3])
def test_a_draft_that_is_always_wrong_costs_nothing_but_time(
    tiny_engine: Any, states: list[HiddenStates], k: int
) -> None:
    for item in states[:8]:
        prompt = prompt_of(item)
        answer = plain(tiny_engine, prompt)
        found = speculative(tiny_engine, Scripted(answer.token_ids, wrong=7), prompt, k)
        assert found.token_ids == answer.token_ids
        assert found.acceptance is not None
        assert found.acceptance.accepted_at == (0,) * k
        assert found.acceptance.num_rounds == len(answer.token_ids) - 1


@pytest.mark.parametrize("k", [1, 2, 4])
def test_a_random_draft_changes_no_token(tiny_engine: Any, states: list[HiddenStates], k: int) -> None:
    draft = Eagle3Draft(draft_config_for(tiny_engine.spec, 300))
    for item in states[:8]:
        prompt = prompt_of(item)
        found = speculative(tiny_engine, DraftChain(draft, torch.arange(300)), prompt, k)
        assert found.token_ids == plain(tiny_engine, prompt).token_ids


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
def test_no_token_is_given_beyond_the_limit(
    tiny_engine: Any, trained: Trainer, states: list[HiddenStates], limit: int
) -> None:
    for item in states[:6]:
        prompt = prompt_of(item)
        found = speculative(tiny_engine, DraftChain(trained.draft, trained.target_ids), prompt, 3, limit)
        assert found.token_ids == plain(tiny_engine, prompt, limit).token_ids


@pytest.mark.parametrize(("k", "limit"), [(1, LIMIT), (3, LIMIT), (5, LIMIT), (3, 11)])
def test_predicted_acceptance_is_the_decoded_one_round_for_round(
    tiny_engine: Any, trained: Trainer, states: list[HiddenStates], k: int, limit: int
) -> None:
    decoded = []
    for item in states:
        prompt = prompt_of(item)
        chain = DraftChain(trained.draft, trained.target_ids)
        found = speculative(tiny_engine, chain, prompt, k, limit)
        assert found.token_ids == plain(tiny_engine, prompt, limit).token_ids
        decoded.append([accepted for _, accepted in found.rounds])
        assert found.acceptance == Acceptance.of(decoded[-1], k)
    predicted = predict_rounds(
        trained.drafter,
        trained.draft,
        trained.teacher,
        trained.target_ids,
        trained.train_states,
        range(len(states)),
        k,
        limit,
    )
    assert predicted == decoded
    assert Acceptance.of([n for rounds in decoded for n in rounds], k).length > 1.3, (
        "the draft should have learned enough for the comparison to mean something"
    )


@pytest.mark.parametrize(("num_layers", "window"), [(2, None), (1, 2), (1, 9), (2, 9)])
def test_the_prediction_holds_for_drafts_of_two_layers_and_of_windows_below_the_context(
    tiny_engine: Any,
    tiny_target: Path,
    states: list[HiddenStates],
    tmp_path: Path,
    num_layers: int,
    window: int | None,
) -> None:
    settings: dict[str, Any] = {"num_epochs": 20, "learning_rate": 1e-2, "max_grad_norm": 5.0}
    settings |= {"num_layers": num_layers, "sliding_window": window}
    trainer = make_trainer(tmp_path, tiny_target, states, states[:4], **settings)
    trainer.run()
    decoded = Acceptance.empty(3)
    for item in states:
        found = speculative(tiny_engine, DraftChain(trainer.draft, trainer.target_ids), prompt_of(item), 3)
        assert found.acceptance is not None
        decoded += found.acceptance
    indices = range(len(states))
    parts = (trainer.drafter, trainer.draft, trainer.teacher, trainer.target_ids, trainer.train_states)
    assert sum(predict_acceptance(*parts, indices, 3, LIMIT), Acceptance.empty(3)) == decoded
    assert decoded.length > 1.2


def test_an_answer_of_one_token_takes_no_round(trained: Trainer, states: list[HiddenStates]) -> None:
    """Also where a later answer of the same sample takes some."""
    item = next(i for i in states if i.sample.loss_mask.sum() > 4)
    mask = item.sample.loss_mask.copy()
    mask[int(mask.argmax()) + 1] = False  # what was one answer is one of a token, and a longer one
    sample = TokenizedSample("short", item.sample.input_ids, mask, item.sample.cut)
    last = item.last[torch.from_numpy(sample.supervised[item.sample.supervised])]
    store = MemoryStore(trained.train_states.spec, [HiddenStates(sample, item.aux, last)])
    parts = (trained.drafter, trained.draft, trained.teacher, trained.target_ids, store)
    assert predict_acceptance(*parts, [0], 3, LIMIT) == [Acceptance.empty(3)]


def test_the_chains_logits_are_the_trainers(trained: Trainer, states: list[HiddenStates]) -> None:
    """The cache of the decoder and the batch of the trainer are two ways to the same first token."""
    from eyas.drafters.common.batch import pack_batch
    from eyas.drafters.eagle3.ttt_rows import rows_of
    from eyas.drafters.eagle3.unroll import unroll

    item = states[0]
    batch = pack_batch([item], rows_of(1), torch.device("cpu"), torch.float32)
    with torch.no_grad():
        ((_, hidden),) = unroll(trained.draft, batch)
        logits = trained.draft.logits(hidden)
        first = int(batch.plan.rows[0][0])
        chain = DraftChain(trained.draft, trained.target_ids)
        tokens = item.sample.input_ids[1 : first + 2].tolist()
        (proposed,) = chain.propose(item.aux[: first + 1], tokens, 1)
    assert proposed == int(trained.target_ids[logits[0].argmax()])


def test_the_first_difference_is_judged_by_the_targets_logits() -> None:
    logits = [{1: 30.0, 7: 1.0}, {2: 20.0, 9: 19.9, 5: 19.5}, {3: 20.0, 1: 2.0}]
    assert first_difference("p", [1, 2, 3], [1, 2, 3], logits) is None
    found = first_difference("p", [1, 2, 3], [1, 5, 3], logits)
    assert found is not None
    assert (found.position, found.expected, found.found, found.top, found.gap) == (1, 2, 5, 20.0, 0.5)
    unlikely = first_difference("p", [1, 2, 3], [1, 6, 3], logits)
    assert unlikely is not None
    assert (unlikely.top, unlikely.gap) == (20.0, None)
    third = first_difference("p", [1, 5, 3], [1, 9, 3])
    assert third is not None
    assert third.gap is None
    assert third.judged(logits[1]).gap == 0.5  # both must be near the likeliest, which is neither


@pytest.mark.parametrize(("expected", "found"), [([1, 2], [1]), ([1], [1, 2])])
def test_an_answer_that_ends_elsewhere_is_never_a_near_tie(expected: list[int], found: list[int]) -> None:
    difference = first_difference("p", expected, found, [{1: 20.0, 2: 20.0}] * len(expected))
    assert difference is not None
    assert not is_near_tie("bfloat16", difference.top, difference.gap)


@pytest.mark.parametrize(
    ("top", "gap", "near"),
    [
        (20.0, 0.5, True),
        (-0.7, 0.5000001, True),  # of log-probabilities
        (20.0, 0.51, False),
        (40.0, 1.0, True),
        (20.0, None, False),
        (float("inf"), float("nan"), False),
    ],
)
def test_what_is_near_a_tie(top: float, gap: float | None, near: bool) -> None:
    assert is_near_tie("bfloat16", top, gap) == near


def test_a_near_tie_is_four_steps_of_rounding_at_the_size_of_the_logit() -> None:
    tops = (-3.0, 16.0, 31.9, 32.0, 70.0)
    assert [near_tie("bfloat16", top) for top in tops] == pytest.approx([0.5, 0.5, 0.5, 1.0, 2.0], rel=1e-3)
    assert near_tie("float16", 20.0) == pytest.approx(0.0625, rel=1e-3)
    assert near_tie("float32", 100.0) == 1e-3
    for dtype in (torch.bfloat16, torch.float16):
        step = torch.nextafter(torch.tensor(20.0, dtype=dtype), torch.tensor(100.0, dtype=dtype)) - 20.0
        assert near_tie(str(dtype).removeprefix("torch."), 20.0) == pytest.approx(4 * float(step), rel=1e-3)
