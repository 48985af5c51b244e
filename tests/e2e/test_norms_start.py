"""What of the target's last layer a draft starts from, with EAGLE-3.1's norms and without."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipeline import eyas, write_run


@pytest.mark.parametrize("fc_norm", [True, False])
def test_the_train_stage_starts_from_the_targets_last_layer_unless_states_are_normed(
    tmp_path: Path, tiny_target: Path, fc_norm: bool
) -> None:
    draft_settings = {"vocab_size": 120, "fc_norm": fc_norm, "norm_output": True}
    run = write_run(tmp_path, tiny_target, draft=draft_settings, train={"learning_rate": 1e-9})
    result = eyas("run", "-c", run)
    assert result.code == 0, result.err
    target = load_file(tiny_target / "model.safetensors")
    draft = load_file(tmp_path / "run" / "draft" / "model.safetensors")
    last = max(int(name.split(".")[2]) for name in target if name.startswith("model.layers."))
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        theirs, own = target[f"model.layers.{last}.{name}.weight"], draft[f"layers.0.{name}.weight"].float()
        assert torch.allclose(own, theirs.float(), atol=1e-5) == (not fc_norm), name
    if fc_norm:
        assert all((draft[f"fc_norm.{layer}.weight"] - 1).abs().max() < 1e-6 for layer in range(3))
