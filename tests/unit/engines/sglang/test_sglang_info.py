"""SGLang's command line, and what eyas asks of an SGLang that it does not start."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from eyas.drafters.common.window import window_keys
from eyas.engines.info import DraftServer, Installed, engine_info
from eyas.errors import UserError

INFO = engine_info("sglang")


def server(kind: str = "eagle3", tp_size: int = 1) -> DraftServer:
    return DraftServer(
        draft=Path("/drafts/d"),
        kind=kind,
        target="/models/t",
        num_draft_tokens=3,
        dtype="bfloat16",
        host="0.0.0.0",
        port=30000,
        tp_size=tp_size,
        gpu_memory_utilization=0.8,
        extra=("--log-level", "info"),
    )


def test_the_command_holds_target_draft_chain_and_address() -> None:
    words = INFO.serve_command(server(tp_size=2), on_cpu=False)
    assert words[:5] == ["python", "-m", "sglang.launch_server", "--model-path", "/models/t"]
    given = dict(itertools.pairwise(words))
    assert (given["--speculative-num-steps"], given["--speculative-num-draft-tokens"]) == ("3", "4")
    assert (given["--tp"], given["--sampling-defaults"], given["--port"]) == ("2", "openai", "30000")
    assert "--mem-fraction-static" not in words, "its share counts other things than vLLM's"
    assert words[-2:] == ["--log-level", "info"]
    assert "--tp" not in INFO.serve_command(server(), on_cpu=False)


@pytest.mark.parametrize(("window", "told"), [(None, None), (64, "63")])
def test_sglang_is_told_an_eagle_3_drafts_window(
    tmp_path: Path, window: int | None, told: str | None
) -> None:
    """Its class of Llama drafts takes none from config.json, and its windows do not count the query."""
    inside = window_keys(window, 1) | {"num_hidden_layers": 1}
    for config in (inside, {"transformer_layer_config": inside}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        words = INFO.serve_command(replace(server(), draft=tmp_path), on_cpu=False)
        assert dict(itertools.pairwise(words)).get("--speculative-draft-window-size") == told
        command = INFO.short_command("eagle3", "owner/target", 3, tmp_path)
        assert "--speculative-draft-model-path THIS_FOLDER" in command
        assert ("--speculative-draft-window-size 63" in command) == (told == "63")


def test_a_kind_of_draft_without_a_file_for_it_is_refused() -> None:
    with pytest.raises(UserError, match="unknown draft architecture 'nokind'"):
        INFO.serve_command(server("nokind"), on_cpu=False)


def test_it_serves_and_decodes_and_neither_captures_nor_generates() -> None:
    assert [INFO.captures, INFO.generates, INFO.serves, bool(INFO.decoder)] == [False, False, True, True]


@pytest.mark.parametrize("version", ["0.5.12.post1", "0.5.14"])
def test_a_version_whose_replies_hold_no_ids_is_refused(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(INFO), "installed", lambda self: Installed(version))
    with pytest.raises(UserError, match=f"SGLang {version} says neither") as caught:
        INFO.start_decoder(None, Path("t"), None)  # type: ignore[arg-type]
    assert caught.value.hint == "pip install 'sglang>=0.5.23'"
