"""The plan says which process holds which GPU, stage by stage, and what cannot fit is refused."""

import dataclasses
from pathlib import Path

import pytest

from eyas import registry
from eyas.config.load import load_config
from eyas.config.schema import RunConfig
from eyas.drafters.eagle3.config import draft_config_for
from eyas.errors import UserError
from eyas.plan import gpu_use as gpu_use_module
from eyas.plan.estimates import PlannedDraft, Tokens
from eyas.plan.gpu_use import GpuUse, check_gpu_use, gpu_use, shared_gpus
from eyas.plan.target_size import TargetSize
from kimi_k25 import KIMI
from tiny import make_spec

RECIPE = Path(__file__).parents[3] / "recipes/kimi-k2.5.yaml"
SPEC = make_spec(**KIMI, aux_layer_ids=(3, 31, 59))
TARGET = TargetSize(
    spec=SPEC,
    num_parameters=10**12,
    weight_bytes=595 * 10**9,
    weight_basis="its files",
    kv_bytes_per_token=61 * 576 * 2,
    latent_cache=True,
    trouble=None,
    is_here=False,
)
DRAFT = PlannedDraft(registry.drafter("eagle3"), draft_config_for(SPEC, 32000))
TOKENS = Tokens(10**8, 10**7, 0.5, 1000, "counted", exact=True)
H200, B200 = 141 * 10**9, 180 * 10**9


def config_of(*settings: str) -> RunConfig:
    return load_config(RECIPE, settings).config


def uses_of(config: RunConfig, num_gpus: int = 8, gpu_bytes: int = H200) -> list[GpuUse]:
    return gpu_use(config, TARGET, TOKENS, DRAFT, num_gpus, gpu_bytes)


@pytest.mark.parametrize("gpu_bytes", [H200, B200])
def test_kimis_recipe_fits_one_machine_of_eight_stage_by_stage(gpu_bytes: int) -> None:
    uses = uses_of(config_of(), gpu_bytes=gpu_bytes)
    assert [(use.stage, use.process, use.num_gpus) for use in uses] == [
        ("regenerate", "vLLM", 8),
        ("extract", "vLLM", 8),
        ("train", "training", 8),
        ("evaluate", "vLLM", 8),
    ]
    assert [use.trouble for use in uses] == [None] * 4
    assert all(use.available == round(0.8 * gpu_bytes) for use in uses if use.process == "vLLM")


def test_what_cannot_fit_is_refused_with_what_it_needs() -> None:
    on_four = uses_of(config_of("vllm.tensor_parallel_size=4", "train.num_gpus=4"), num_gpus=4)
    assert on_four[1].trouble == "each GPU needs 149 GB and gives 113"
    assert uses_of(config_of(), num_gpus=4)[1].trouble == "it wants 8 GPUs, the machine has 4"
    here = uses_of(config_of("evaluate.in_process=true"))[3]
    assert (here.process, here.num_gpus) == ("the target in this process", 1)
    assert str(here.trouble).endswith("set evaluate.in_process=false")


def test_a_server_on_the_same_machine_holds_the_gpus_that_a_later_stage_wants() -> None:
    local = config_of("regenerate.endpoint=http://127.0.0.1:8000/v1")
    assert "all 8 of this machine are wanted by extract and evaluate" in str(shared_gpus(local, 8))
    assert shared_gpus(local, 16) is None
    assert shared_gpus(config_of("regenerate.endpoint=http://elsewhere:8000/v1"), 8) is None
    assert shared_gpus(config_of(), 8) is None


def test_a_run_is_refused_where_the_gpus_are_not_there_or_held(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = ["regenerate", "extract", "train"]
    check_gpu_use(config_of(), stages)  # no GPU: ranks are on cores
    monkeypatch.setattr(gpu_use_module, "num_gpus_here", lambda: 4)
    with pytest.raises(UserError, match=r"tensor_parallel_size=8, and this machine has 4 GPUs"):
        check_gpu_use(config_of(), stages)
    check_gpu_use(config_of(), ["train"])
    monkeypatch.setattr(gpu_use_module, "num_gpus_here", lambda: 8)
    held = [False]
    monkeypatch.setattr(gpu_use_module, "gpus_are_held", lambda: held[0])
    local = config_of("regenerate.endpoint=http://localhost:8000/v1")
    check_gpu_use(local, stages)
    held[0] = True
    with pytest.raises(UserError, match="holds GPUs"):
        check_gpu_use(local, stages)
    check_gpu_use(local, ["extract"])  # it has answered, and another one is no business of ours


def test_uses_are_plain_values() -> None:
    assert dataclasses.asdict(uses_of(config_of())[0])["num_gpus"] == 8
