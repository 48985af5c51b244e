"""The fingerprint of a target's weights sees a fine-tune, wherever they are stored, at little cost."""

import json
import math
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.config.schema import TargetSettings
from eyas.safetensors_io import Entry
from eyas.targets.files import ELSEWHERE
from eyas.targets.spec import as_recorded, read_target
from eyas.targets.weights import Weights
from eyas.targets.weights_fingerprint import (
    _fingerprint_of_0_1,
    _samples,
    fingerprint_weights,
    sampled_names,
    way_of,
)
from families import TINY, make_family, quantise_experts, shard_weights
from tiny import make_target, spec_of


@pytest.fixture
def target(tiny_target: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_target, tmp_path / "target"))


def read(folder: Path) -> dict[str, torch.Tensor]:
    # Copies: what load_file gives are windows on the file that is written over.
    return {name: t.clone() for name, t in load_file(folder / "model.safetensors").items()}


def sampled(folder: Path) -> str:
    return fingerprint_weights(Weights(folder), "sampled")


def test_a_merged_adapter_is_another_target_although_the_files_ends_are_equal(tmp_path: Path) -> None:
    folder = make_target(tmp_path / "target", hidden_size=64, intermediate_size=512)
    before, tensors = spec_of(folder), read(folder)
    ends = _fingerprint_of_0_1(Weights(folder))
    merged = [n for n in tensors if "proj" in n and ".layers.0." not in n and ".layers.5." not in n]
    for name in merged:
        tensors[name] += (
            1e-3 * torch.randn(tensors[name].shape[0], 1) @ torch.randn(1, tensors[name].shape[1])
        )
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert _fingerprint_of_0_1(Weights(folder)) == ends, "0.1 does not see it"
    assert spec_of(folder).weights_fingerprint != before.weights_fingerprint


@pytest.mark.parametrize("name", ["llama-tied", "qwen3-moe", "deepseek-v3", "gemma3-wrapped"])
def test_a_change_of_any_one_tensor_that_is_sampled_is_seen(tmp_path: Path, name: str) -> None:
    folder = make_family(tmp_path / name, name, 2)
    before, tensors = sampled(folder), read(folder)
    chosen = sampled_names(tensors)
    assert set(tensors) - set(chosen) <= {n for n in tensors if ".experts." in n}
    for changed in chosen:
        save_file(tensors | {changed: tensors[changed] + 1}, folder / "model.safetensors")
        assert sampled(folder) != before, changed
    save_file(tensors, folder / "model.safetensors")
    assert sampled(folder) == before


def test_one_expert_in_64_of_each_layer_is_sampled_and_never_none() -> None:
    def experts(layers: int, number: int) -> list[str]:
        return [
            f"model.layers.{i}.mlp.experts.{e}.up_proj.weight" for i in range(layers) for e in range(number)
        ]

    for number, expected in ((4, 1), (64, 1), (128, 2), (384, 6), (100, 1)):
        chosen = sampled_names(experts(40, number))
        by_layer = [[n for n in chosen if f".layers.{i}." in n] for i in range(40)]
        assert {len(names) for names in by_layer} <= {expected, expected + 1}
        assert len({n.split(".experts.")[1] for n in chosen}) > min(number, 20) / 4, (
            "not the same of each layer"
        )
    shared = ["model.layers.0.mlp.shared_experts.up_proj.weight", "model.layers.0.mlp.gate.weight"]
    assert set(shared) <= set(sampled_names([*shared, *experts(1, 384)]))


def test_a_tensor_costs_one_sample_and_one_of_many_experts_one_for_64() -> None:
    names = {
        "model.embed_tokens.weight": (163840, 8),
        "model.layers.0.mlp.shared_experts.up_proj.weight": (2048, 8),
        "model.layers.0.mlp.experts.0.up_proj.weight": (2048, 8),
        "model.layers.1.mlp.experts.gate_up_proj": (128, 8, 8),
    }
    entries = {name: Entry("BF16", shape, 0, 2 * math.prod(shape)) for name, shape in names.items()}
    counts = Counter(name for name, _, _ in _samples(entries))
    assert [counts[name] for name in names] == [1, 1, 1, 2]


def test_experts_in_one_tensor_are_sampled_once_in_64(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    name, values = "model.layers.0.mlp.experts.gate_up_proj", torch.zeros(256, 64, 32)
    save_file({name: values}, path)
    before = sampled(tmp_path)
    seen = 0
    for quarter in range(16):  # a sample is 4 KiB of 2 MiB: most edits of one expert escape, as the docs say
        changed = values.clone()
        changed[16 * quarter : 16 * quarter + 16] = 1
        save_file({name: changed}, path)
        seen += sampled(tmp_path) != before
    assert 2 <= seen <= 5


def test_the_same_tensors_in_other_files_are_the_same_target(target: Path) -> None:
    before = {way: fingerprint_weights(Weights(target), way) for way in ("sampled", "full")}  # type: ignore[arg-type]
    shard_weights(target, 3)
    assert {way: fingerprint_weights(Weights(target), way) for way in before} == before  # type: ignore[arg-type]


@pytest.mark.parametrize("change", ["name", "shape", "dtype"])
def test_a_header_that_says_something_else_is_another_target(tmp_path: Path, change: str) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(4, 8)}, path)
    before = sampled(tmp_path)
    other = {
        "name": {"b": torch.zeros(4, 8)},
        "shape": {"a": torch.zeros(8, 4)},
        "dtype": {"a": torch.zeros(4, 8, dtype=torch.int32)},
    }
    save_file(other[change], path)
    assert sampled(tmp_path) != before


def test_one_byte_is_seen_when_all_are_asked_for(target: Path) -> None:
    settings = TargetSettings(model=str(target), fingerprint="full")
    before = read_target(target, settings).weights_fingerprint
    assert before.startswith("full-")
    assert way_of(before) == "full"
    path = target / "model.safetensors"
    data = bytearray(path.read_bytes())
    for place in (-1, -(len(data) // 3), -(len(data) // 2)):
        data[place] ^= 1
        path.write_bytes(data)
        assert read_target(target, settings).weights_fingerprint != before
        data[place] ^= 1
    path.write_bytes(data)
    assert read_target(target, settings).weights_fingerprint == before


@pytest.mark.parametrize("way", ["sampled", "full", "0.1"])
def test_a_record_is_compared_in_the_way_it_was_made(target: Path, way: str) -> None:
    weights = Weights(target)
    recorded = _fingerprint_of_0_1(weights) if way == "0.1" else fingerprint_weights(weights, way)  # type: ignore[arg-type]
    assert as_recorded(spec_of(target), recorded, target).weights_fingerprint == recorded
    tensors = read(target)
    save_file({n: t + 1 for n, t in tensors.items()}, target / "model.safetensors")
    assert as_recorded(spec_of(target), recorded, target).weights_fingerprint != recorded


def test_quantised_experts_are_another_target(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    folder = make_family(tmp_path / "moe", "qwen3-moe", 2)
    before = sampled(folder)
    assert sampled(quantise_experts(folder)) != before


# ------------------------------------------------------------- a terabyte, here and behind a URL
class SlowRanges(SimpleHTTPRequestHandler):
    """Serves byte ranges of files of any size, each after the time a bucket takes; counts what it does."""

    protocol_version = "HTTP/1.1"
    latency_s = 0.03
    requests, sent = 0, 0
    lock = threading.Lock()

    def do_GET(self) -> None:
        time.sleep(self.latency_s)
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            self.send_error(404)
            return
        size = path.stat().st_size
        first, last, status = 0, size - 1, 200
        if wanted := self.headers.get("Range"):
            begin, _, end = wanted.removeprefix("bytes=").partition("-")
            first, last, status = int(begin), min(int(end or size), size - 1), 206
        body = b""
        if self.command == "GET":
            assert last - first < 1 << 26, "a whole file was asked for"
            with path.open("rb") as f:
                f.seek(first)
                body = f.read(last + 1 - first)
        self.send_response(status)
        self.send_header("Accept-Ranges", "bytes")
        if status == 206:
            self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        self.send_header("Content-Length", str(last + 1 - first))
        self.end_headers()
        self.wfile.write(body)
        with SlowRanges.lock:
            SlowRanges.requests += 1
            SlowRanges.sent += len(body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def terabyte(tmp_path: Path) -> Path:
    """A checkpoint in FP8 of 61 layers and 64 large experts, in 61 files that take no room on disk."""
    folder, width, expert_width = tmp_path / "served", 7168, 6 * 2048
    folder.mkdir()
    weight_map = {}
    for layer in range(61):
        prefix = f"model.layers.{layer}."
        shapes = {f"{prefix}self_attn.{n}.weight": (width, 1536) for n in ("q_a_proj", "q_b_proj", "o_proj")}
        shapes |= {f"{prefix}{n}.weight": (width,) for n in ("input_layernorm", "post_attention_layernorm")}
        for expert in range(64):
            for n in ("gate_proj", "up_proj", "down_proj"):
                shapes[f"{prefix}mlp.experts.{expert}.{n}.weight"] = (width, expert_width)
        if layer == 0:
            shapes |= {"model.embed_tokens.weight": (163840, width), "lm_head.weight": (163840, width)}
        name = f"model-{layer + 1:05d}-of-00061.safetensors"
        write_hollow(folder / name, shapes)
        weight_map |= dict.fromkeys(shapes, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def write_hollow(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    header, offset = {}, 0
    for name, shape in shapes.items():
        size = int(torch.Size(shape).numel())
        header[name] = {"dtype": "F8_E4M3", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    try:
        with path.open("wb") as f:
            f.write(len(text).to_bytes(8, "little") + text)
            f.truncate(8 + len(text) + offset)
    except OSError as error:
        pytest.skip(f"no such large file here: {error}")
    if path.stat().st_blocks * 512 > 1 << 28:
        path.unlink()
        pytest.skip("the file system has no sparse files")


@pytest.fixture
def url(terabyte: Path) -> Iterator[str]:
    http = ThreadingHTTPServer(("127.0.0.1", 0), partial(SlowRanges, directory=str(terabyte)))
    http.daemon_threads = True
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{http.server_port}"
    http.shutdown()
    http.server_close()
    thread.join()


def test_a_terabyte_behind_a_url_is_fingerprinted_in_less_than_two_minutes(
    terabyte: Path, url: str, tmp_path: Path
) -> None:
    here = Weights(terabyte)
    assert here.num_bytes > 1e12
    started = time.monotonic()
    known = fingerprint_weights(here, "sampled")
    assert time.monotonic() - started < 30
    folder = tmp_path / "described"
    folder.mkdir()
    (folder / ELSEWHERE).write_text(json.dumps({"url": url}))
    SlowRanges.requests = SlowRanges.sent = 0
    started = time.monotonic()
    weights = Weights(folder)
    weights.check_complete()
    assert fingerprint_weights(weights, "sampled") == known
    assert time.monotonic() - started < 120
    assert SlowRanges.requests < 800
    assert SlowRanges.sent < 50e6


def test_all_families_are_fingerprinted(tmp_path: Path) -> None:
    found = {sampled(make_family(tmp_path / name, name, 1)) for name in ("llama", "qwen2", "phi", "gpt-oss")}
    assert len(found) == 4
    assert set(TINY) > {"llama", "qwen2", "phi", "gpt-oss"}
