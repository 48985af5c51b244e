"""A draft with EAGLE-3.1's norms starts from the target's last layer, scaled by the states it will read."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from pipeline import eyas, write_run


def test_the_train_stage_scales_what_the_layer_adds_by_the_size_of_the_stored_states(
    tmp_path: Path, tiny_target: Path
) -> None:
    run = write_run(
        tmp_path,
        tiny_target,
        draft={"vocab_size": 120, "fc_norm": True, "norm_output": True},
        train={"learning_rate": 1e-9},
    )
    result = eyas("run", "-c", run)
    assert result.code == 0, result.err
    target = load_file(tiny_target / "model.safetensors")
    draft = load_file(tmp_path / "run" / "draft" / "model.safetensors")
    last = max(int(name.split(".")[2]) for name in target if name.startswith("model.layers."))
    ratios = [
        target[f"model.layers.{last}.{name}.weight"] / draft[f"layers.0.{name}.weight"].float()
        for name in ("self_attn.o_proj", "mlp.down_proj")
    ]
    size = float(ratios[0].median())
    assert size > 1.5
    for ratio in ratios:
        torch.testing.assert_close(ratio, torch.full_like(ratio, size), rtol=1e-3, atol=0)
    assert all((draft[f"fc_norm.{layer}.weight"] - 1).abs().max() < 1e-6 for layer in range(3))
