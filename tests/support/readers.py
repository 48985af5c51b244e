"""Every reader of files that others may have written or a machine may have damaged, each behind one door.

A reader takes bytes and a folder to put them in, and returns or raises an EyasError: a file is read, or
refused in words. Whatever else it does is a bug. ``GENUINE`` holds what each reads without objection.
"""

import json
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import torch
from safetensors.torch import save

from eyas.capture.import_samples import _rows, _sample
from eyas.config.load import load_config
from eyas.data.row_formats import parse_row
from eyas.data.sources import Drop, read_source
from eyas.drafters.eagle3.model import Eagle3Draft
from eyas.export.read import read_draft
from eyas.files import seal
from eyas.run_folder import read_record
from eyas.store.journal import last_attempts, read_journal, repair_journal
from eyas.store.manifest import StoreManifest
from eyas.store.shards import ShardStore, ShardWriter
from eyas.targets.weights import Weights
from eyas.train.checkpoint import read_checkpoint
from eyas.types import HiddenStates, TokenizedSample
from tiny import make_spec

Reader = Callable[[bytes, Path], object]
SPEC = make_spec()


def read_manifest(data: bytes, folder: Path) -> None:
    (folder / "manifest.json").write_bytes(data)
    manifest = StoreManifest.read(folder)
    assert manifest.num_shards >= 0


def read_lines_of_journal(data: bytes, folder: Path) -> None:
    (folder / "journal.jsonl").write_bytes(data)
    read_journal(folder, strict=False)
    last_attempts(folder)
    try:
        read_journal(folder)
    finally:
        repair_journal(folder)
        read_journal(folder, strict=False)


def read_shard(data: bytes, folder: Path) -> None:
    """Read a shard whose length and checksum are those journalled: what its own header says may be wrong."""
    from eyas.safetensors_io import checksum_of_file

    (folder / "shard-00000.safetensors").write_bytes(data)
    line = json.loads(_store()[1].splitlines()[0])
    line.pop("seal")
    line |= {
        "num_bytes": len(data),
        "checksum": checksum_of_file(folder / "shard-00000.safetensors"),
    }
    (folder / "journal.jsonl").write_text(json.dumps(seal(line)) + "\n")
    (folder / "manifest.json").write_bytes(_store()[0])
    store = ShardStore(folder)
    for index in range(len(store.lengths)):
        states = store.read(index)
        assert states.aux.shape[1:] == (SPEC.num_aux_layers, SPEC.hidden_size)


def read_run_file(data: bytes, folder: Path) -> None:
    (folder / "run.yaml").write_bytes(data)
    load_config(folder / "run.yaml")


def read_override(data: bytes, folder: Path) -> None:
    load_config(None, (data.decode("utf-8", "replace"), "run_dir=x", "target.model=y", "data.sources=[]"))


def read_conversations(data: bytes, folder: Path) -> None:
    (folder / "data").write_bytes(data)
    for row in read_source(str(folder / "data")):
        if not isinstance(row, Drop):
            parsed = parse_row(row, {})
            str(parsed.record).encode("utf-8", "surrogatepass")


def read_token_rows(data: bytes, folder: Path) -> None:
    path = folder / "rows.jsonl"
    path.write_bytes(data)
    for number, row in _rows(path):
        _sample(path, number, row, 64, Counter())


def read_draft_config(data: bytes, folder: Path) -> None:
    (folder / "config.json").write_bytes(data)
    (folder / "model.safetensors").write_bytes(_draft()[1])
    read_draft(folder)


def read_draft_weights(data: bytes, folder: Path) -> None:
    (folder / "config.json").write_bytes(_draft()[0])
    (folder / "model.safetensors").write_bytes(data)
    read_draft(folder)


def read_checkpoint_facts(data: bytes, folder: Path) -> None:
    (folder / "checkpoint.json").write_bytes(data)
    read_checkpoint(folder)


def read_stage_record(data: bytes, folder: Path) -> None:
    (folder / "stage.json").write_bytes(data)
    read_record(folder)


def read_target_weights(data: bytes, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(data)
    weights = Weights(folder)
    for name in weights.file_of:
        weights.read(name)


def read_target_index(data: bytes, folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_bytes(data)
    Weights(folder).check_complete()


READERS: dict[str, Reader] = {
    "manifest": read_manifest,
    "journal": read_lines_of_journal,
    "shard": read_shard,
    "run file": read_run_file,
    "override": read_override,
    "conversations": read_conversations,
    "token rows": read_token_rows,
    "draft config": read_draft_config,
    "draft weights": read_draft_weights,
    "checkpoint": read_checkpoint_facts,
    "stage record": read_stage_record,
    "target weights": read_target_weights,
    "target index": read_target_index,
}


@cache
def _store() -> tuple[bytes, bytes, bytes]:
    """Return manifest, journal and shard of a store of two samples."""
    folder = Path(mkdtemp(prefix="eyas-readers-"))
    samples = [
        TokenizedSample(f"s{i}", np.arange(5, 11, dtype=np.int32), np.arange(6) > 1, bool(i))
        for i in range(2)
    ]
    states = [
        HiddenStates(
            s, torch.randn(6, 3, SPEC.hidden_size), torch.randn(int(s.supervised.sum()), SPEC.hidden_size)
        )
        for s in samples
    ]
    ShardWriter(folder, StoreManifest(SPEC, "data", (0, 2))).write(0, states)
    names = ("manifest.json", "journal.jsonl", "shard-00000.safetensors")
    return tuple((folder / name).read_bytes() for name in names)  # type: ignore[return-value]


@cache
def _draft() -> tuple[bytes, bytes]:
    """Return the configuration and the weights of a small draft."""
    from eyas.drafters.eagle3.config import draft_config_for

    draft = Eagle3Draft(draft_config_for(SPEC, SPEC.vocab_size))
    tensors = {n: p.detach().clone().contiguous() for n, p in draft.trainable().items()}
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "intermediate_size": 32,
        "vocab_size": 50,
        "draft_vocab_size": 50,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
    }
    return json.dumps(config).encode(), save(tensors)


_RUN = b"""\
run_dir: r
target: {model: m}
data: {sources: [a.jsonl], max_length: 64}
train: {learning_rate: 1e-4, betas: [0.9, 0.95]}
regenerate: {extra_body: {top_p: 0.9}}
"""
_TALK = b"""\
{"id": 1, "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": ["a"]}]}
{"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}], "tools": "[]"}
{"instruction": "do", "input": "it", "output": "done", "history": [["a", "b"]]}
{"prompt": "p", "response": "r"}
{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}
{"turns": ["a", "b"]}
{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]}
"""
GENUINE: dict[str, Callable[[], bytes]] = {
    "manifest": lambda: _store()[0],
    "journal": lambda: _store()[1],
    "shard": lambda: _store()[2],
    "run file": lambda: _RUN,
    "override": lambda: b"train.learning_rate=1e-4",
    "conversations": lambda: _TALK,
    "token rows": lambda: b'{"id": 1, "input_ids": [1, 2], "loss_mask": [0, 1]}\n{"input_ids": []}\n',
    "draft config": lambda: _draft()[0],
    "draft weights": lambda: _draft()[1],
    "checkpoint": lambda: json.dumps(
        seal(
            {
                "format_version": 1, "step": 1, "num_steps": 2, "spec": SPEC.to_json(), "draft_config": {},
                "data_fingerprint": "d", "settings_fingerprint": "s", "metrics": {}, "sha256": {},
            }
        )
    ).encode(),
    "stage record": lambda: json.dumps(
        seal({"stage": "x", "format": 2, "inputs": {}, "done": True})
    ).encode(),
    "target weights": lambda: save({"model.embed_tokens.weight": torch.ones(2, 3)}),
    "target index": lambda: b'{"weight_map": {"a.weight": "model-00001-of-00001.safetensors"}}',
}  # fmt: skip
