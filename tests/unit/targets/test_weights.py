"""Single tensors by byte range: quantised ones, out of files of 600 GB, and from elsewhere."""

import json
import resource
import shutil
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.config.schema import TargetSettings
from eyas.errors import ContractError, UserError
from eyas.targets.quantized import read_weight
from eyas.targets.resolve_model import locate, locate_description
from eyas.targets.spec import read_target
from eyas.targets.teacher import read_last_layer, read_teacher
from eyas.targets.weights import Weights
from families import shard_weights
from tiny import make_target, spec_of

ROWS, COLUMNS = 300, 64


@pytest.fixture
def target(tiny_target: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_target, tmp_path / "target"))


def write_head(folder: Path, **tensors: torch.Tensor) -> Weights:
    """Write a checkpoint whose head consists of ``tensors``, and open it."""
    folder.mkdir(exist_ok=True)
    named = {f"lm_head.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, folder / "model.safetensors")
    return Weights(folder)


# ------------------------------------------------------------- quantised heads
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 64), (8, 32)])
@pytest.mark.parametrize("reordered", [False, True])
def test_packed_integers_are_those_that_compressed_tensors_unpacks(
    tmp_path: Path, bits: int, group: int, reordered: bool
) -> None:
    packing = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    limit = 1 << (bits - 1)
    values = torch.randint(-limit, limit, (ROWS, COLUMNS), dtype=torch.int8)
    scale = torch.rand(ROWS, COLUMNS // group).to(torch.bfloat16)
    group_of = torch.arange(COLUMNS) // group
    extra = {}
    if reordered:
        group_of = group_of[torch.randperm(COLUMNS)]
        extra["weight_g_idx"] = group_of.int()
    packed = packing.pack_to_int32(values, bits)
    weights = write_head(
        tmp_path,
        weight_packed=packed,
        weight_scale=scale,
        weight_shape=torch.tensor([ROWS, COLUMNS]),
        **extra,
    )
    unpacked = packing.unpack_from_int32(packed, bits, torch.Size([ROWS, COLUMNS]))
    expected = unpacked.float() * scale.float()[:, group_of]
    assert torch.equal(read_weight(weights, "lm_head", torch.float32), expected)


def test_packed_integers_with_a_scale_a_row_and_a_ragged_last_word_are_read(tmp_path: Path) -> None:
    packing = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    values = torch.randint(-8, 8, (ROWS, 61), dtype=torch.int8)
    scale = torch.rand(ROWS, 1)
    weights = write_head(
        tmp_path,
        weight_packed=packing.pack_to_int32(values, 4),
        weight_scale=scale,
        weight_shape=torch.tensor([ROWS, 61]),
    )
    assert torch.equal(read_weight(weights, "lm_head", torch.float32), values.float() * scale)


@pytest.mark.parametrize(
    ("scale_name", "scale_shape"),
    [("weight_scale", ()), ("weight_scale", (1,)), ("weight_scale", (ROWS, 1)), ("weight_scale_inv", (3, 2))],
)
def test_fp8_is_multiplied_by_the_scale_of_its_tensor_row_or_block(
    tmp_path: Path, scale_name: str, scale_shape: tuple[int, ...]
) -> None:
    weight = torch.randn(ROWS, 200).to(torch.float8_e4m3fn)
    scale = torch.rand(scale_shape) + 0.5
    weights = write_head(tmp_path, weight=weight, **{scale_name: scale})
    found = read_weight(weights, "lm_head", torch.float32)
    for row in (0, 127, 128, 299):
        for column in (0, 127, 128, 199):
            own = (
                scale[row // 128, column // 128]
                if scale_shape == (3, 2)
                else scale.flatten()[row % scale.numel()]
            )
            assert float(found[row, column]) == pytest.approx(float(weight[row, column].float() * own))


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["qweight", "qzeros", "scales"], "GPTQ or AWQ"),
        (["weight_packed", "weight_scale", "weight_global_scale"], "NVFP4"),
        (["weight", "weight_scale", "weight_scale_2"], "NVFP4"),
        (["weight_blocks", "weight_scales"], "MXFP4"),
        (["weight_packed", "weight_scale", "weight_zero_point"], "asymmetric compressed-tensors"),
        (["weight"], "U8"),
    ],
)
def test_a_head_quantised_in_another_way_is_refused_by_its_name(
    tmp_path: Path, names: list[str], kind: str
) -> None:
    weights = write_head(tmp_path, **{name: torch.zeros(4, 4, dtype=torch.uint8) for name in names})
    with pytest.raises(UserError, match=f"lm_head of .* is quantised as {kind}, which eyas does not read"):
        read_weight(weights, "lm_head", torch.float32)


def test_fp8_without_a_scale_is_refused(tmp_path: Path) -> None:
    weights = write_head(tmp_path, weight=torch.zeros(4, 4).to(torch.float8_e4m3fn))
    with pytest.raises(UserError, match="FP8 without a weight_scale"):
        read_weight(weights, "lm_head", torch.float32)


def test_a_layer_in_fp8_is_not_what_a_draft_starts_from(target: Path) -> None:
    spec = spec_of(target)
    tensors = load_file(target / "model.safetensors")
    name = "model.layers.5.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, target / "model.safetensors")
    assert "mlp.up_proj.weight" not in read_last_layer(target, spec)
    assert "mlp.down_proj.weight" in read_last_layer(target, spec)


# ------------------------------------------------------------- tied heads, damaged folders
def test_a_tied_model_that_holds_its_head_twice_is_tied_and_one_with_another_head_is_refused(
    tmp_path: Path,
) -> None:
    folder = make_target(tmp_path / "tied", tied=True)
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embedding.clone()}, folder / "model.safetensors")
    teacher = read_teacher(folder, spec_of(folder))
    assert teacher.head is teacher.embedding
    save_file(tensors | {"lm_head.weight": embedding + 1}, folder / "model.safetensors")
    with pytest.raises(ContractError, match="ties the head to the embedding, but its weights hold another"):
        read_teacher(folder, spec_of(folder))


def test_an_untied_model_without_a_head_is_refused(target: Path) -> None:
    tensors = load_file(target / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, target / "model.safetensors")
    with pytest.raises(UserError, match="holds no lm_head"):
        spec_of(target)


@pytest.mark.parametrize("with_index", [True, False])
def test_a_missing_shard_is_named_before_anything_is_done(target: Path, with_index: bool) -> None:
    shard_weights(target, 3, with_index)
    (target / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(UserError, match=r"lacks model-00002-of-00003\.safetensors"):
        spec_of(target)


def test_a_shard_that_was_not_copied_to_its_end_is_named(target: Path) -> None:
    shard_weights(target, 2)
    path = target / "model-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(UserError, match=r"model-00001-of-00002\.safetensors is damaged: it has \d+ bytes"):
        spec_of(target)


def test_a_second_copy_in_the_makers_format_is_left_alone(target: Path) -> None:
    save_file({"tok_embeddings.weight": torch.zeros(2, 2)}, target / "consolidated.safetensors")
    (target / "model.safetensors").rename(target / "weights.safetensors")
    assert Weights(target).file_names == ["weights.safetensors"]


def write_sparse(path: Path, tensors: dict[str, torch.Tensor], hole_bytes: int) -> None:
    """Write ``tensors`` with a hole of experts in front of each that takes no room on disk."""
    header, offset = {}, 0
    for number, (name, tensor) in enumerate(tensors.items()):
        hole = [offset, offset + hole_bytes]
        header[f"model.layers.{number}.mlp.experts.weight_packed"] = {
            "dtype": "I32",
            "shape": [hole_bytes // 4],
            "data_offsets": hole,
        }
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [hole[1], hole[1] + size],
        }
        offset = hole[1] + size
    text = json.dumps(header).encode()
    with path.open("wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        start = f.tell()
        for name, tensor in tensors.items():
            f.seek(start + header[name]["data_offsets"][0])
            f.write(tensor.contiguous().numpy().tobytes())
        f.truncate(start + offset)


def test_three_tensors_come_out_of_600_gigabytes_in_seconds_and_in_their_own_memory(target: Path) -> None:
    path = target / "model.safetensors"
    # Copies: what load_file gives are windows on the file that is written over.
    known, spec = {name: t.clone() for name, t in load_file(path).items()}, spec_of(target)
    names = ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight")
    try:
        write_sparse(path, {name: known[name] for name in names}, 200_000_000_000)
    except OSError as error:
        pytest.skip(f"no file of 600 GB here: {error}")
    if path.stat().st_blocks * 512 > 1 << 30:
        path.unlink()
        pytest.skip("the file system has no sparse files")
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    described, teacher = spec_of(target), read_teacher(target, spec)
    assert time.monotonic() - started < 60, "reading all of it takes many minutes"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB
    assert described.weights_fingerprint != spec.weights_fingerprint
    assert torch.equal(teacher.head, known["lm_head.weight"])
    assert torch.equal(teacher.norm_weight, known["model.norm.weight"])
    assert Weights(target).num_bytes > 600_000_000_000


# ------------------------------------------------------------- elsewhere
class RangeHandler(SimpleHTTPRequestHandler):
    """Serves byte ranges, as buckets and hubs do, and notes how much it sent."""

    sent = 0

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            self.send_error(404)
            return
        data, status = path.read_bytes(), 200
        headers = {"Accept-Ranges": "bytes"}
        if wanted := self.headers.get("Range"):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            stop = int(last) + 1 if last else len(data)
            headers["Content-Range"] = f"bytes {first}-{min(stop, len(data)) - 1}/{len(data)}"
            data, status = data[int(first) : stop], 206
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)
            RangeHandler.sent += len(data)

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "served").mkdir()
    handler = partial(RangeHandler, directory=str(tmp_path / "served"))
    http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{http.server_port}"
    http.shutdown()
    http.server_close()
    thread.join()


def test_a_target_elsewhere_is_the_same_target_and_only_its_head_is_fetched(
    tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # Most of it are layers, as in any large model.
    local = make_target(tmp_path / "served" / "model", hidden_size=32, intermediate_size=8192)
    shard_weights(local, 3)
    RangeHandler.sent = 0
    folder = locate_description(f"{server}/model")
    assert not list(folder.glob("*.safetensors"))
    spec = read_target(folder, TargetSettings(model=f"{server}/model"))
    assert spec.fingerprint == spec_of(local).fingerprint
    far, near = read_teacher(folder, spec), read_teacher(local, spec)
    assert torch.equal(far.head, near.head)
    assert torch.equal(far.embedding, near.embedding)
    assert Weights(folder).num_bytes > 10 * RangeHandler.sent
    with pytest.raises(UserError, match="an engine needs the whole model on this machine"):
        locate(f"{server}/model")


def test_a_target_elsewhere_that_lacks_a_shard_or_is_not_there_is_named(
    tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    local = make_target(tmp_path / "served" / "model")
    shard_weights(local, 2)
    (local / "model-00002-of-00002.safetensors").unlink()
    folder = locate_description(f"{server}/model")
    with pytest.raises(UserError, match=r"model lacks model-00002-of-00002\.safetensors"):
        read_target(folder, TargetSettings(model="x"))
    with pytest.raises(UserError, match=r"nothing has no config\.json"):
        locate_description(f"{server}/nothing")
    with pytest.raises(UserError, match="cannot open nowhere://x"):
        locate_description("nowhere://x")
