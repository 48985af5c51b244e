"""Which baselines can draft for a target, and what vLLM is told."""

import importlib.util
import json
from pathlib import Path

import pytest

from eyas.engines.vllm.baselines import parse_baseline
from eyas.errors import UserError
from tiny import spec_of


def test_what_vllm_is_told() -> None:
    ngram = parse_baseline("ngram").speculative_config(None, 3)
    assert ngram == {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 5,
    }
    model = parse_baseline("draft_model:/models/small").speculative_config(None, 2)
    assert model == {"method": "draft_model", "num_speculative_tokens": 2, "model": "/models/small"}
    suffix = parse_baseline("suffix").speculative_config(None, 3)
    assert suffix["suffix_decoding_max_cached_requests"] == 0, (
        "or later rounds copy the answers of earlier ones"
    )
    assert parse_baseline("mtp").speculative_config(None, 1) == {"method": "mtp", "num_speculative_tokens": 1}


@pytest.mark.parametrize("name", ["medusa", "draft_model", "ngram:/a", ""])
def test_an_unknown_baseline_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(UserError, match=r"is none of ngram, suffix, mtp, draft_model:FOLDER"):
        parse_baseline(name)


def test_what_cannot_draft_here_is_refused_before_an_engine_starts(tiny_target: Path, tmp_path: Path) -> None:
    spec = spec_of(tiny_target)
    with pytest.raises(UserError, match="has no MTP layers"):
        parse_baseline("mtp").check(tiny_target, spec)
    parse_baseline(f"draft_model:{tiny_target}").check(tiny_target, spec)
    with pytest.raises(UserError, match="is no model folder"):
        parse_baseline(f"draft_model:{tmp_path}").check(tiny_target, spec)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 9}))
    with pytest.raises(UserError, match=f"has 9 ids, the target {spec.vocab_size}"):
        parse_baseline(f"draft_model:{tmp_path}").check(tiny_target, spec)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"mtp_num_hidden_layers": 1}}))
    parse_baseline("mtp").check(tmp_path, spec)


@pytest.mark.parametrize(("name", "package"), [("suffix", "arctic-inference"), ("ngram", "numba")])
def test_a_missing_package_is_named(
    name: str, package: str, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    with pytest.raises(UserError) as refused:
        parse_baseline(name).check(tiny_target, spec_of(tiny_target))
    assert f"pip install {package}" in (refused.value.hint or "")
