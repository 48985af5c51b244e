"""Counters of speculative decoding are read as differences, from vLLM and SGLang."""

from types import SimpleNamespace

import pytest

from eyas.engines.spec_decode_metrics import SpecCounters, from_prometheus, from_vllm
from eyas.errors import UserError

VLLM = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 2.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.79e+09
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 9.0
vllm:spec_decode_num_accepted_tokens_total{engine="1",model_name="m"} 1.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 6.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="0"} 1.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 3.0
"""
SGLANG = """\
sglang:spec_accept_length{model_name="m",tp_rank="0"} 2.75
sglang:spec_verify_calls_total{model_name="m",tp_rank="0"} 40.0
sglang:generation_tokens_total{model_name="m"} 90.0
"""


def test_vllms_page_gives_rounds_and_accepted_tokens_of_all_engines() -> None:
    assert from_prometheus(VLLM) == SpecCounters(12, 10, (7, 3))


def test_vllms_own_metrics_give_the_same() -> None:
    metrics = [
        SimpleNamespace(name="vllm:num_requests_running", value=3),
        SimpleNamespace(name="vllm:spec_decode_num_drafts", value=12),
        SimpleNamespace(name="vllm:spec_decode_num_accepted_tokens", value=10),
        SimpleNamespace(name="vllm:spec_decode_num_accepted_tokens_per_pos", values=[7, 3]),
    ]
    assert from_vllm(metrics) == SpecCounters(12, 10, (7, 3))


def test_differences_count_and_a_position_that_was_not_shown_yet_was_zero() -> None:
    assert SpecCounters(12, 10, (7, 3)) - SpecCounters(2, 1, (1, 0)) == SpecCounters(10, 9, (6, 3))
    assert SpecCounters(12, 10, (7, 3)) - SpecCounters() == SpecCounters(12, 10, (7, 3))


def test_sglangs_page_gives_rounds_only() -> None:
    counted = from_prometheus(SGLANG) - SpecCounters(20)
    assert counted == SpecCounters(20)
    assert counted.rates is None
    # 50 tokens of 4 answers: 46 of them came from 20 rounds, and up to 4 were cut off.
    assert counted.lengths(50, 4) == (2.3, 2.5)


def test_an_average_alone_is_refused() -> None:
    with pytest.raises(UserError, match="average acceptance length"):
        from_prometheus('sglang:spec_accept_length{model_name="m"} 2.75\n')


def test_a_server_without_a_draft_is_refused() -> None:
    with pytest.raises(UserError, match="counts no speculative decoding"):
        from_prometheus('vllm:num_requests_running{engine="0"} 1.0\nnot a metric\n')


def test_the_length_lies_between_what_was_delivered_and_what_was_counted() -> None:
    # Two answers, 5 rounds, 6 accepted, two of them behind an end: 5 + 4 tokens after the first.
    counted = SpecCounters(5, 6, (4, 2))
    assert counted.lengths(11, 2) == (1.8, 2.2)
    assert counted.rates == [0.8, 0.4]
