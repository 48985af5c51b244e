import math

import pytest
import torch

from eyas.config.schema import TrainSettings
from eyas.drafters.eagle3.config import draft_config_for
from eyas.drafters.eagle3.model import HEADS, TABLES, Eagle3Draft
from eyas.errors import UserError
from eyas.train.learning_rate import learning_rate, with_peak_rate
from eyas.train.optim import make_optimizers
from tiny import make_spec

SETTINGS = TrainSettings(learning_rate=1.0, warmup_share=0.1)


def test_the_rate_rises_linearly_to_its_peak_and_never_starts_at_zero() -> None:
    rates = [learning_rate(step, 100, SETTINGS) for step in range(11)]
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.0])


def test_the_rate_falls_by_half_a_cosine_to_a_twentieth() -> None:
    assert learning_rate(55, 100, SETTINGS) == pytest.approx(0.05 + 0.95 / 2)
    falling = [learning_rate(step, 100, SETTINGS) for step in range(10, 100)]
    assert falling == sorted(falling, reverse=True)
    assert falling[-1] == pytest.approx(0.05 + 0.475 * (1 + math.cos(math.pi * 89 / 90)))


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_the_shortest_runs_have_a_positive_rate(num_steps: int) -> None:
    for share in (0.0, 0.05, 0.9):
        settings = TrainSettings(learning_rate=1.0, warmup_share=share)
        assert all(learning_rate(step, num_steps, settings) > 0 for step in range(num_steps))


def test_the_optimizer_holds_every_trainable_tensor_and_decays_matrices_only() -> None:
    draft = Eagle3Draft(draft_config_for(make_spec(), 20))
    settings = TrainSettings(learning_rate=1.0, optimizer="adamw", weight_decay=0.1)
    optimizer, _ = make_optimizers(draft.trainable(), settings, HEADS, TABLES)
    decayed, free = optimizer.param_groups
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.1, 0.0)
    assert {p.ndim for p in decayed["params"]} == {2}
    assert {p.ndim for p in free["params"]} == {1}
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in draft.parameters() if p is not draft.embed_tokens.weight}


@pytest.mark.parametrize("train_head", [True, False])
def test_muon_takes_the_layers_matrices_and_adamw_the_rest(train_head: bool) -> None:
    draft = Eagle3Draft(draft_config_for(make_spec(), 20))
    settings = TrainSettings(learning_rate=1.0, optimizer="muon", train_head=train_head)
    adamw, muon = make_optimizers(draft.trainable(), settings, HEADS, TABLES)
    assert muon is not None
    names = {p: n for n, p in draft.trainable().items()}
    by_muon = {names[p] for group in muon.param_groups for p in group["params"]}
    by_adamw = {names[p] for group in adamw.param_groups for p in group["params"]}
    assert not by_muon & by_adamw
    assert draft.trainable().keys() - by_muon - by_adamw == (set() if train_head else {"lm_head.weight"})
    assert by_muon == {n for n, p in draft.trainable().items() if p.ndim == 2} - {"lm_head.weight"}


@pytest.mark.parametrize(
    ("width", "rate"), [(576, 3e-3), (896, 2.41e-3), (1536, 1.84e-3), (4096, 1.13e-3), (7168, 8.5e-4)]
)
def test_auto_is_3e_3_at_width_576_and_falls_with_the_root_of_the_width(width: int, rate: float) -> None:
    settings = TrainSettings()
    assert with_peak_rate(settings, width, continued=False).learning_rate == rate
    assert with_peak_rate(TrainSettings(optimizer="adamw"), 576, continued=False).learning_rate == 2e-3
    halved = with_peak_rate(settings, width, continued=True).learning_rate
    assert halved == pytest.approx(rate / 2, rel=5e-3)


def test_a_rate_that_was_asked_for_is_taken_at_every_width() -> None:
    assert with_peak_rate(SETTINGS, 7168, continued=True).learning_rate == SETTINGS.learning_rate


def test_masters_that_are_not_fp32_are_refused() -> None:
    draft = Eagle3Draft(draft_config_for(make_spec(), 20)).to(torch.bfloat16)
    with pytest.raises(AssertionError, match="fp32"):
        make_optimizers(draft.trainable(), SETTINGS, HEADS, TABLES)


def test_a_draft_copies_the_targets_shape_where_nothing_else_is_asked() -> None:
    spec = make_spec()
    config = draft_config_for(spec, 20)
    assert (config.num_attention_heads, config.head_dim, config.intermediate_size) == (4, 4, 32)
    wider = draft_config_for(spec, 20, intermediate_size=8, num_attention_heads=8)
    assert (wider.num_attention_heads, wider.head_dim, wider.intermediate_size) == (8, 2, 8)


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, None), (None, 3), (8, 3)])
def test_draft_heads_that_do_not_divide_are_refused(heads: int | None, kv_heads: int | None) -> None:
    with pytest.raises(UserError, match=r"draft\.num_") as caught:
        draft_config_for(make_spec(), 20, None, heads, kv_heads)
    assert caught.value.hint


def test_without_a_warm_up_the_first_step_has_the_whole_rate() -> None:
    settings = TrainSettings(learning_rate=1.0, warmup_share=0.0)
    assert learning_rate(0, 100, settings) == 1.0
    assert learning_rate(1, 100, settings) == 1.0
    assert learning_rate(2, 100, settings) < 1.0
