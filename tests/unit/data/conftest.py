"""Fixtures of the data tests; see data_support."""

from data_support import run_prepare, shared, smollm2

__all__ = ["run_prepare", "shared", "smollm2"]
