"""docs/reference/targets.md is what its script makes."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def test_the_page_of_targets_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)  # restores sys.path, which the script extends
    page = runpy.run_path(str(ROOT / "docs/reference/make_targets.py"))["targets_page"]()
    current = (ROOT / "docs/reference/targets.md").read_text(encoding="utf-8")
    assert page == current, "run: python docs/reference/make_targets.py"
