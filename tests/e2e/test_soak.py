"""A short soak; tests/soak.py does the same with thousands of samples (benchmarks/LOG.md)."""

from pathlib import Path

from soak import soak


def test_faults_at_random_lose_nothing_and_neither_memory_nor_files_grow(tmp_path: Path) -> None:
    found = soak(tmp_path, num_samples=300, num_faults=10)
    assert sum(found["struck"].values()) >= 5
    # The first attempts load what stays loaded.
    assert max(found["open_files"][4:]) <= found["open_files"][3] + 2
    assert max(found["memory_mib"][4:]) <= found["memory_mib"][3] + 60
