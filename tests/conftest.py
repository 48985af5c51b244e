import contextlib
import os
from pathlib import Path

# Nothing in a test may reach a hub. One thread a process: the tests run in two processes, and threads that
# wait for each other on the same cores make small models ten times slower.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch

from eyas.engines.transformers.engine import TransformersEngine
from eyas.types import TargetSpec
from tiny import make_target, spec_of

# The same examples each time, and no example too slow for a busy machine. It is not in every environment.
with contextlib.suppress(ImportError):
    from hypothesis import settings

    settings.register_profile("steady", deadline=None, derandomize=True)
    settings.load_profile("steady")


# Folders whose tests start engines, train or run whole stages.
SLOW_FOLDERS = {"contract", "e2e", "parity"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name in SLOW_FOLDERS:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a six-layer random Llama with a ChatML tokenizer, in fp32."""
    return make_target(tmp_path_factory.mktemp("target") / "tiny-llama")


@pytest.fixture(scope="session")
def tiny_spec(tiny_target: Path) -> TargetSpec:
    return spec_of(tiny_target)


@pytest.fixture(scope="session")
def tiny_engine(tiny_target: Path, tiny_spec: TargetSpec) -> TransformersEngine:
    return TransformersEngine(tiny_target, tiny_spec, batch_tokens=128, batch_size=4)


@pytest.fixture(autouse=True)
def _one_seed() -> None:
    torch.manual_seed(0)
