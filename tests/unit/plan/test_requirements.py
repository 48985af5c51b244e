"""What a run needs is compared with what the machine has, by the facts of its engine."""

from pathlib import Path
from typing import Any

import pytest

from eyas import registry
from eyas.config.load import load_config
from eyas.config.schema import RunConfig
from eyas.drafters.eagle3.config import draft_config_for
from eyas.plan.estimates import PlannedDraft, Tokens
from eyas.plan.requirements import Need, disk_needs, memory_needs
from eyas.plan.summary import Plan, print_plan
from eyas.plan.target_size import TargetSize
from tiny import make_spec

TOKENS = Tokens(900, 100, 0.5, 10, "counted", exact=True)
DRAFT = PlannedDraft(registry.drafter("eagle3"), draft_config_for(make_spec(), 30))
GIB = 2**30


def size_of(weight_bytes: int = GIB) -> TargetSize:
    return TargetSize(
        spec=make_spec(),
        num_parameters=1,
        weight_bytes=weight_bytes,
        weight_basis="its files",
        kv_bytes_per_token=10,
        latent_cache=False,
        trouble=None,
        is_here=True,
    )


def config_of(folder: Path, *settings: str) -> RunConfig:
    return load_config(None, (f"run_dir={folder}", "target.model=m", "data.sources=[a]", *settings)).config


def test_an_engine_that_reserves_a_share_has_that_share(tmp_path: Path) -> None:
    config = config_of(tmp_path, "extract.engine=vllm", "vllm.gpu_memory_utilization=0.5")
    engine, training = memory_needs(config, size_of(), TOKENS, DRAFT, gpu_memory=4)
    assert (engine.what, engine.available, engine.fits) == ("extract, a GPU", 2 * GIB, True)
    assert (training.what, training.available) == ("train, a GPU", 4 * GIB)
    assert memory_needs(config, size_of(3 * GIB), TOKENS, DRAFT, gpu_memory=4)[0].fits is False


def test_next_to_a_stream_the_engine_takes_its_share_or_what_it_needs(tmp_path: Path) -> None:
    stream = "train.source=stream"
    reserving = config_of(tmp_path, "extract.engine=vllm", "vllm.gpu_memory_utilization=0.25", stream)
    _, training, states = memory_needs(reserving, size_of(), TOKENS, DRAFT, gpu_memory=4)
    assert training.available == 3 * GIB
    assert states.bytes == reserving.train.stream_bytes
    growing = config_of(tmp_path, stream)
    engine, beside, _ = memory_needs(growing, size_of(), TOKENS, DRAFT, gpu_memory=4)
    alone = memory_needs(config_of(tmp_path), size_of(), TOKENS, DRAFT, gpu_memory=4)[1]
    assert (beside.bytes, beside.available) == (alone.bytes + engine.bytes, 4 * GIB)


def test_the_disk_is_asked_for_what_is_not_done(tmp_path: Path) -> None:
    states = {"extract": "to do", "train": "to do", "export": "to do"}
    needs = disk_needs(config_of(tmp_path / "new" / "run"), size_of(), TOKENS, DRAFT, states)
    assert needs[0].what == "hidden states"
    assert needs[-1].bytes == sum(n.bytes for n in needs[:-1])
    done = disk_needs(config_of(tmp_path), size_of(), TOKENS, DRAFT, states | {"extract": "done"})
    assert done[-1].bytes == needs[-1].bytes - needs[0].bytes


def test_a_plan_is_printed_with_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    needs = [Need("states", 3 * GIB, GIB, "basis"), Need("more", 1, None, "basis")]
    plan = Plan(size_of(), TOKENS, 10, 10**6, 1e-3, needs, [], [], ["mind this"])
    print_plan(plan)
    shown = capsys.readouterr().out
    assert "DOES NOT FIT" in shown
    assert "note: mind this" in shown
    rows: Any = plan.to_json()["disk"]
    assert [row["fits"] for row in rows] == [False, None]
