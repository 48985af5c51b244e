"""Block drafts go from prepare to evaluate on the tiny target, as a user runs them."""

import json
from pathlib import Path
from typing import Any

import pytest

from eyas.export.read import read_draft
from pipeline import eyas, write_run


@pytest.mark.parametrize("form", ["native", "speculators"])
@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_block_draft_goes_from_prepare_to_evaluate(
    tmp_path: Path, tiny_target: Path, kind: str, form: str
) -> None:
    draft: dict[str, Any] = {"architecture": kind, "num_layers": 2, "block_size": 5, "num_anchors": 8}
    # Part of the vocabulary in one format, all of it in the other.
    draft["vocab_size"] = 120 if form == "speculators" else None
    run_file = write_run(tmp_path, tiny_target, draft=draft, export={"format": form})
    screen = eyas("run", "-c", run_file)
    assert screen.code == 0, screen.err
    report = json.loads((tmp_path / "run" / "evaluation" / "report.json").read_text())
    assert report["identical"] == report["num_prompts"]
    assert report["predicted"] == report["acceptance"]
    stored = read_draft(tmp_path / "run" / "draft")
    assert (stored.architecture, stored.shape.block_size) == (kind, 5)
    assert stored.aux_layer_ids == (2, 3, 4)
    # The tokenizer fills the embedding of this target: its padding is the mask token.
    assert stored.shape.mask_token_id == 1
