"""The recipes of the harness: how each trainer is given the answers, started, and its draft found.

``prepare`` writes what a trainer reads into ``data`` (not timed, shared by its runs); ``train`` runs in a
process of its own and leaves the draft in ``folder/draft`` and ``facts.json`` (the steps taken) next to it.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness_answers import Answers, Chosen, Part

Prepare = Callable[[Answers, Chosen, Path], None]
Train = Callable[[Path, Chosen, Path, Path, int, list[str]], None]
# Draft ids of peers: eyas' default.
DRAFT_VOCAB_SIZE = 32000


@dataclass(frozen=True)
class Recipe:
    prepare: Prepare
    train: Train


def steps_taken(folder: Path, num_steps: int) -> None:
    (folder / "facts.json").write_text(json.dumps({"steps": num_steps}))


def run_command(words: list[Any], **further: Any) -> None:
    done = subprocess.run([str(word) for word in words], **further)
    if done.returncode:
        sys.exit(done.returncode)


def prepare_nothing(answers: Answers, chosen: Chosen, data: Path) -> None:
    """eyas reads the store."""


def train_eyas(
    run_file: Path, chosen: Chosen, data: Path, folder: Path, seed: int, settings: list[str]
) -> None:
    """What ``eyas train`` does, on some of the answers; nothing is validated but the last weights."""
    import torch

    from eyas.config.load import load_config
    from eyas.data.vocab import always_kept, build_vocab_map, count_supervised
    from eyas.export.native import NativeExporter
    from eyas.stages.init_from import new_draft
    from eyas.stages.run_context import RunContext
    from eyas.targets.teacher import read_teacher
    from eyas.train.loop import Trainer

    rare = 10**9  # steps
    words = [*settings, f"seed={seed}", f"train.num_epochs={chosen.num_epochs}"]
    words += [f"train.validate_every={rare}", f"train.save_every={rare}"]
    context = RunContext(load_config(run_file, tuple(words)))
    if context.config.train.num_gpus > 1 or context.config.train.source != "store":
        sys.exit("the harness trains on one GPU, from a store")
    answers = Answers(run_file, context)
    states = Part(answers.train, chosen.indices)
    counts = count_supervised((states.sample(i) for i in range(len(states.indices))), context.spec.vocab_size)
    always = always_kept(counts, context.spec.eos_token_ids, context.tokenizer.added_tokens_decoder)
    vocab = build_vocab_map(counts, context.config.draft.vocab_size, always)
    teacher = read_teacher(context.target_folder, context.spec).to("cpu", torch.float32)
    trainer = Trainer(
        drafter=context.drafter,
        draft=new_draft(context, vocab, teacher),
        draft_settings=context.config.draft,
        teacher=teacher,
        vocab=vocab,
        train_states=states,
        held_out_states=Part(answers.held_out, range(1)),
        settings=context.config.train,
        seed=seed,
        root=folder / "checkpoints",
        device=torch.device(context.train_device),
    )
    trainer.run()
    with trainer.averaged():
        (folder / "draft").mkdir()
        NativeExporter(context.drafter.name).write(folder / "draft", trainer.draft, context.draft_spec, vocab)
    steps_taken(folder, len(trainer.batches))


def prepare_speculators(answers: Answers, chosen: Chosen, data: Path) -> None:
    """Write ids and masks as a datasets folder, a file of states a sample, and its own count of tokens.

    Its teacher of a row is the state of a supervised position. The store holds those whose next token is the
    answer's, so nothing is learned of the last token of an answer, as in eyas.
    """
    import torch
    from datasets import Dataset
    from safetensors.torch import save_file
    from speculators.train.vocab_mapping import save_token_frequency_distribution

    (data / "hidden_states").mkdir()
    # Its validation wants a sample: the last one again. What it says there changes nothing.
    indices = [*chosen.indices, chosen.indices[-1]]
    samples = [answers.train.sample(index) for index in indices]
    for number, index in enumerate(indices):
        states = answers.train.read(index)
        last = torch.zeros_like(states.aux[:, 0])  # (T, D)
        last[torch.from_numpy(states.sample.supervised)] = states.last
        own = {
            "hidden_states": torch.cat([states.aux, last[:, None]], dim=1).contiguous(),
            "token_ids": torch.from_numpy(states.sample.input_ids).long(),
        }
        save_file(own, data / "hidden_states" / f"hs_{number}.safetensors")

    def rows(masks: list[Any]) -> Any:
        columns = {
            "input_ids": [s.input_ids.tolist() for s in samples],
            "loss_mask": [mask.astype(int).tolist() for mask in masks],
            "seq_len": [len(s) for s in samples],
        }
        made = Dataset.from_dict(columns)
        made.set_format(type="torch")
        return made

    rows([s.supervised for s in samples]).save_to_disk(str(data))
    written = rows([s.loss_mask for s in samples]).select(range(len(chosen.indices)))
    save_token_frequency_distribution(written, data / "token_freq.pt")


def train_speculators(
    run_file: Path, chosen: Chosen, data: Path, folder: Path, seed: int, flags: list[str]
) -> None:
    """Call its command: all is its default but the budget, the draft's ids, the layers and its loss.

    Its fused loss does not compile with every Triton, so the eager one is taken; a flag can ask for it.
    """
    context = _context(run_file)
    num = len(chosen.indices)
    size = min(DRAFT_VOCAB_SIZE, context.spec.vocab_size)
    command = [
        sys.executable, "-m", "speculators", "train",
        "--verifier-name-or-path", context.target_folder, "--data-path", data,
        "--save-path", folder / "trained", "--target-layer-ids", *context.draft_spec.aux_layer_ids,
        "--train-data-ratio", (num + 0.5) / (num + 1), "--epochs", chosen.num_epochs,
        "--draft-vocab-size", size, "--on-missing", "raise", "--seed", seed, "--loss-implementation", "eager",
        *flags,
    ]  # fmt: skip
    run_command(command)
    last = folder / "trained" / str(chosen.num_epochs - 1)
    (folder / "draft").symlink_to(last.resolve())
    steps_taken(folder, json.loads((last / "training_state.json").read_text())["global_step"])


def prepare_specforge(answers: Answers, chosen: Chosen, data: Path) -> None:
    """Write a file a sample, the target's embedding and head as it looks for them, and the draft's shape.

    Its head is bfloat16 and has no norm in front, so the states are normed here. A row learns from the state
    of the next position: rows of which that is not stored, the last of each answer, are not supervised.
    """
    import numpy as np
    import torch
    from safetensors.torch import save_file

    from eyas.targets.teacher import read_teacher

    context = answers.context
    spec = context.spec
    teacher = read_teacher(context.target_folder, spec)
    (data / "states").mkdir()
    for number, index in enumerate(chosen.indices):
        states = answers.train.read(index)
        sample = states.sample
        last = torch.zeros_like(states.aux[:, 0])  # (T, D)
        last[torch.from_numpy(sample.supervised)] = teacher.normed(states.last)
        own = {
            "input_ids": torch.from_numpy(sample.input_ids).long(),
            "loss_mask": torch.from_numpy(sample.loss_mask & np.append(sample.supervised[1:], False)).long(),
            "hidden_state": last[None].bfloat16(),
            "aux_hidden_state": states.aux.flatten(1)[None].bfloat16(),
        }
        torch.save(own, data / "states" / f"{number:08d}.ckpt")
    target = data / "target"
    target.mkdir()
    for path in context.target_folder.iterdir():
        if path.suffix != ".safetensors" and not path.name.endswith(".index.json"):
            (target / path.name).symlink_to(path.resolve())
    names = {"model.embed_tokens.weight": teacher.embedding, "lm_head.weight": teacher.head}
    save_file({name: t.clone().contiguous() for name, t in names.items()}, target / "model.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "model.safetensors")}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    (data / "draft.json").write_text(json.dumps(_specforge_shape(spec)))


def _specforge_shape(spec: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": spec.num_attention_heads,
        "num_key_value_heads": spec.num_key_value_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_position_embeddings,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_parameters.get("rope_theta", 10000.0),
        "pad_token_id": 0,
        "vocab_size": spec.vocab_size,
        "draft_vocab_size": min(DRAFT_VOCAB_SIZE, spec.vocab_size),
    }


def train_specforge(
    run_file: Path, chosen: Chosen, data: Path, folder: Path, seed: int, overrides: list[str]
) -> None:
    """Call its command: all is its default but the budget, the draft's ids and what it would log."""
    config = {
        "model": {"target_model_path": str(data / "target"), "draft_model_config": str(data / "draft.json")},
        "data": {"hidden_states_path": str(data / "states"), "cache_dir": str(data / "cache")},
        "training": {"num_epochs": chosen.num_epochs, "seed": seed},
        "output_dir": str(folder / "trained"),
        "run_id": "run",
    }
    (folder / "specforge.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "specforge.cli"]
    run_command([*command, "train", "-c", folder / "specforge.json", *overrides])
    last = max((folder / "trained").glob("run-step*"), key=lambda path: int(path.name.rpartition("step")[2]))
    export = ["export", "--to", "sglang", "--checkpoint", last, "--draft-config", data / "draft.json"]
    run_command([*command, *export, "--output-dir", folder / "draft"])
    steps_taken(folder, int(last.name.rpartition("step")[2]))


def _context(run_file: Path) -> Any:
    from eyas.config.load import load_config
    from eyas.stages.run_context import RunContext

    return RunContext(load_config(run_file))


RECIPES = {
    "eyas": Recipe(prepare_nothing, train_eyas),
    "speculators": Recipe(prepare_speculators, train_speculators),
    "specforge": Recipe(prepare_specforge, train_specforge),
}
