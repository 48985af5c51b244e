"""A draft with EAGLE-3.1's norms starts from the sizes of the states it will read."""

from pathlib import Path

from safetensors.torch import load_file

from pipeline import eyas, write_run


def test_the_train_stage_starts_the_norms_at_the_sizes_of_the_stored_states(
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
    tensors = load_file(tmp_path / "run" / "draft" / "model.safetensors")
    starts = [tensors[f"fc_norm.{layer}.weight"] for layer in range(3)]
    assert all(len(w.unique()) == 1 for w in starts)
    assert 1.5 < float(starts[0][0]) < float(starts[1][0]) < float(starts[2][0])  # the stream grows
