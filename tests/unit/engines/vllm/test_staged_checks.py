"""What a server hands over is compared with what it was asked for, check by check."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_server_session import AUX, Server, engine_of

from eyas.config.schema import VllmSettings
from eyas.engines.vllm.engine import VllmEngine
from eyas.engines.vllm.state_transfer import StagedStates, layer_digests, write_digests, write_states
from eyas.errors import UserError
from eyas.types import Failure, HiddenStates
from vllm_cases import make_model, mixed_samples, spec_of_model


class Lying(Server):
    """Writes other states than it says, and only after the handshake."""

    layer_ids: tuple[int, ...] | None = None
    shift = cut = narrow = 0
    dtype = torch.float32
    reason, names_path, token, digests = "length", True, True, True

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        if not self.names:  # the handshake
            return super().complete(body)
        name = body["vllm_xargs"]["eyas_file"]
        self.names.append(name)
        path, ids = self.folder / name, torch.tensor(body["prompt"])
        layer_ids = self.layer_ids or tuple(self.facts["layer_ids"])
        shape = (len(ids) - self.cut, len(layer_ids), self.spec.hidden_size - self.narrow)
        states = ids[: shape[0], None, None].expand(shape).to(self.dtype).contiguous()
        if name.startswith("probe_output-") and self.digests:
            write_digests(path, 0, layer_digests(states))
        staged = StagedStates.split(states, ids[: shape[0]], layer_ids)
        if self.shift or self.cut:
            staged = StagedStates(
                staged.lower, staged.last, staged.figures, ids + self.shift, staged.layer_ids
            )
        write_states(path, staged)
        logprobs = {"token_logprobs": [-1.5]} if body["logprobs"] else None
        choice = {"finish_reason": self.reason, "token_ids": [7], "logprobs": logprobs}
        params = {"hidden_states_path": str(path), "eyas": self.facts} if self.names_path else None
        return {"choices": [choice], "kv_transfer_params": params}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture
def server(tmp_path: Path, model: Path) -> Iterator[Lying]:
    made = Lying(tmp_path / "shared", spec_of_model(model, AUX))
    yield made
    made.close()


def captured(server: Lying, model: Path) -> HiddenStates | Failure:
    engine = engine_of(server, model)
    try:
        (item,) = engine.capture(mixed_samples([5]))
        return item
    finally:
        engine.close()


def refused(server: Lying, model: Path) -> str:
    item = captured(server, model)
    assert isinstance(item, Failure)
    return item.reason


def test_what_was_asked_for_is_taken(server: Lying, model: Path) -> None:
    assert isinstance(captured(server, model), HiddenStates)


@pytest.mark.parametrize("layer_ids", [(1, 3, 4), (0, 2, 4), (1, 2, 3)])
def test_states_of_other_layers_are_refused(server: Lying, model: Path, layer_ids: tuple[int, ...]) -> None:
    server.layer_ids = layer_ids
    assert refused(server, model) == (f"the worker captured layers {layer_ids}, asked for {(1, 2, 4)}")


@pytest.mark.parametrize("shift", [1, -1])
def test_states_of_other_tokens_are_refused(server: Lying, model: Path, shift: int) -> None:
    server.shift = shift
    assert refused(server, model) == "the worker captured other token ids than it was sent"


def test_states_of_fewer_rows_than_tokens_are_refused(server: Lying, model: Path) -> None:
    server.cut = 1
    assert "the worker wrote (4, 2, 128)" in refused(server, model)


def test_states_of_another_width_are_refused(server: Lying, model: Path) -> None:
    server.narrow = 8
    assert "the worker wrote (5, 2, 120)" in refused(server, model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_states_of_another_type_are_refused(server: Lying, model: Path, dtype: torch.dtype) -> None:
    server.dtype = dtype
    assert f"(5, 2, 128) {dtype}, expected (5, 2, 128) float32" in refused(server, model)


def test_a_request_that_did_not_end_at_its_length_is_refused(server: Lying, model: Path) -> None:
    server.reason = "abort"
    assert refused(server, model) == "vLLM ended the request with 'abort'"


def test_an_answer_that_names_no_file_is_refused(server: Lying, model: Path) -> None:
    server.names_path = False
    assert refused(server, model) == "vLLM names no file of states for this request"


@pytest.mark.parametrize(("positions", "is_enough"), [(64, False), (65, True), (66, True)])
def test_a_server_needs_one_position_more_than_the_longest_sample(
    server: Lying, model: Path, positions: int, is_enough: bool
) -> None:
    server.max_model_len = positions
    engine = VllmEngine(
        model, spec_of_model(model, AUX), settings=VllmSettings(), endpoint=server.url, max_length=64
    )
    try:
        if is_enough:
            assert engine.probe_outputs([]) == []
            return
        with pytest.raises(UserError) as caught:
            engine.probe_outputs([])
        assert caught.value.what == (
            f"the server at {server.url} takes 64 positions; samples of data.max_length=64 need 65"
        )
        assert str(caught.value.hint).endswith("or set data.max_length=63")
    finally:
        engine.close()
