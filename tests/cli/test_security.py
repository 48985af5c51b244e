"""What a stranger's files may do here: nothing but be read. And what nobody may read: secrets."""

import ast
import base64
import json
import logging
import os
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

import eyas as package
from eyas.data.chat import ChatRenderer
from eyas.data.render_error import RenderError
from eyas.engines.endpoint import EndpointEngine
from eyas.engines.vllm.server_session import ServerSession
from eyas.errors import ContractError, UserError
from eyas.files import seal
from eyas.stages.serve import ServeOptions, serve
from eyas.store.journal import read_journal
from eyas.store.manifest import StoreManifest
from eyas.store.shards import ShardStore, ShardWriter
from eyas.targets.spec import read_target
from eyas.targets.weights import Weights
from eyas.train.checkpoint import best_checkpoint
from eyas.types import Conversation, Message, TargetSpec
from pipeline import change_json, eyas, write_run
from tiny import make_spec, make_tokenizer, spec_of

SOURCES = sorted(Path(package.__file__).parent.rglob("*.py"))
PASSWORD, TOKEN = "hunter2-is-secret", "hf_" + "A1b2C3d4" * 4


# ---------------------------------------------------------------- code
def test_nothing_of_ours_unpickles_or_runs_text_as_code() -> None:
    """Read from the source: no pickle by any name, no torch.load at all, no eval, exec or unsafe YAML."""
    modules = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "cPickle"}
    found = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name.partition(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [(node.module or "").partition(".")[0]]
            if set(names) & modules:
                found.append((path.name, node.lineno, names))
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                unsafe = called in ("eval", "exec", "torch.load", "yaml.load", "yaml.unsafe_load", "np.load")
                flags = {k.arg: ast.unparse(k.value) for k in node.keywords}
                if unsafe or flags.get("weights_only") == "False" or flags.get("allow_pickle") == "True":
                    found.append((path.name, node.lineno, [called]))
                if flags.get("shell") == "True" or called == "os.system":
                    found.append((path.name, node.lineno, [called]))
                if flags.get("trust_remote_code") == "True":
                    found.append((path.name, node.lineno, [called]))
    assert found == []
    assert len(SOURCES) > 100


@pytest.mark.parametrize("where", ["config.json", "tokenizer_config.json"])
def test_code_in_a_model_folder_does_not_run(tiny_target: Path, tmp_path: Path, where: str) -> None:
    target, mark = Path(shutil.copytree(tiny_target, tmp_path / "target")), tmp_path / "ran"
    (target / "stranger.py").write_text(
        f"open({str(mark)!r}, 'w')\nfrom transformers import LlamaConfig, PreTrainedTokenizerFast\n"
        "class Config(LlamaConfig): model_type = 'stranger'\nclass Words(PreTrainedTokenizerFast): pass\n"
    )
    if where == "config.json":
        change_json(target / where, model_type="stranger", auto_map={"AutoConfig": "stranger.Config"})
    else:
        change_json(
            target / where, tokenizer_class="Words", auto_map={"AutoTokenizer": [None, "stranger.Words"]}
        )
    screen = eyas("prepare", "-c", write_run(tmp_path, target))
    assert not mark.exists()
    if where == "config.json":
        assert screen.code == 2
        assert "hint: set target.trust_remote_code=true if you trust the code" in screen.err
    else:  # a tokenizer.json needs no code, and is what is used
        assert screen.code in (0, 2)


def test_a_chat_template_runs_in_the_sandbox() -> None:
    conversation = Conversation("c", (Message("user", "hello"), Message("assistant", "yes")), "here")
    for template in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append('more') }}",
        "{% for i in range(999999999) %}x{% endfor %}",
        "{{ cycler.__init__.__globals__.os.system('touch /tmp/eyas-ran') }}",
    ):
        tokenizer = make_tokenizer(template)
        with pytest.raises(RenderError, match="template_error"):
            ChatRenderer(tokenizer, [tokenizer.eos_token_id]).samples(conversation, 64)
    assert not Path("/tmp/eyas-ran").exists()


# ---------------------------------------------------------------- paths
def test_an_index_cannot_name_weights_outside_of_the_model_folder(tiny_target: Path, tmp_path: Path) -> None:
    target = Path(shutil.copytree(tiny_target, tmp_path / "target"))
    names = Weights(target).file_of
    (target / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    for file in ("../elsewhere.safetensors", str(tmp_path / "elsewhere.safetensors"), 7):
        index = {"weight_map": dict.fromkeys(names, file)}
        (target / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(UserError, match="no file of that folder"):
            spec_of(target)


def test_records_of_a_store_cannot_name_files_outside_of_it(tmp_path: Path) -> None:
    """A record says which shard; the file's name is made from its number alone."""
    manifest = StoreManifest(make_spec(), "data", (0, 1))
    ShardWriter(tmp_path / "store", manifest).write(0, [])
    line = json.loads((tmp_path / "store" / "journal.jsonl").read_text())
    line.pop("seal")
    for shard in ("../../other", "0", None, [0], 0.5):
        text = json.dumps(seal(line | {"shard": shard})) + "\n"
        (tmp_path / "store" / "journal.jsonl").write_text(text)
        with pytest.raises(ContractError, match="line 1 is damaged"):
            ShardStore(tmp_path / "store")
    for shard in (-1, 10**9):
        (tmp_path / "store" / "journal.jsonl").write_text(json.dumps(seal(line | {"shard": shard})) + "\n")
        assert list(read_journal(tmp_path / "store")) == [shard]
        with pytest.raises(ContractError, match="incomplete"):
            ShardStore(tmp_path / "store")


def test_the_mark_of_the_best_checkpoint_cannot_lead_elsewhere(tmp_path: Path) -> None:
    for step in ("../../elsewhere", None, [1], {"a": 1}, "1/../.."):
        (tmp_path / "best.json").write_text(json.dumps({"step": step}))
        with pytest.raises(ContractError, match=r"best\.json is damaged"):
            best_checkpoint(tmp_path)


def test_ids_never_become_names_of_files(tiny_target: Path, tmp_path: Path) -> None:
    """Conversations named like paths go through the stages that keep files of samples."""
    rows = [
        {"id": f"../../../{tmp_path.name}-escaped/{i}", "messages": [
            {"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": f"well {i} it is so"}]}
        for i in range(8)
    ]  # fmt: skip
    run_file = write_run(tmp_path / "in", tiny_target, regenerate={"enabled": False}) if (
        (tmp_path / "in").mkdir() or True
    ) else None  # fmt: skip
    (tmp_path / "in" / "prompts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    before = {p for p in tmp_path.parent.rglob("*") if "in/run" not in str(p)}
    for stage in ("prepare", "extract"):
        screen = eyas(stage, "-c", str(run_file))
        assert screen.code == 0, screen.err
    assert {p for p in tmp_path.parent.rglob("*") if "in/run" not in str(p)} == before


class _Server(BaseHTTPRequestHandler):
    """Says that the states lie in a file of ours; remembers what it was told."""

    names: Path
    seen: list[str]

    def _reply(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        type(self).seen.append(self.headers.get("Authorization", ""))
        self._reply({"data": [{"id": "model", "max_model_len": 4096}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        params = {"eyas": {}, "hidden_states_path": str(type(self).names)}
        self._reply({"choices": [{"finish_reason": "length"}], "kv_transfer_params": params})

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ThreadingHTTPServer]:
    _Server.names, _Server.seen = tmp_path / "mine.safetensors", []
    with ThreadingHTTPServer(("127.0.0.1", 0), _Server) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield http
        http.shutdown()
        thread.join()


def test_a_server_cannot_have_our_files_read_and_removed(
    server: ThreadingHTTPServer, tiny_spec: TargetSpec
) -> None:
    one = torch.zeros(1, 1, 1)
    save_file({"lower": one, "last": one[0].clone(), "token_ids": one[0, 0].long()}, _Server.names)
    with pytest.raises(UserError, match="names no file of states"):
        ServerSession(
            f"http://127.0.0.1:{server.server_port}/v1", tiny_spec, folder=None, max_length=8, in_flight=1
        )
    assert _Server.names.is_file()


# ---------------------------------------------------------------- servers
def test_servers_listen_to_this_machine_alone_unless_told_otherwise(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ServeOptions(Path("draft")).host == "127.0.0.1"
    screen = eyas("serve-capture", "--model-path", tiny_target, "--print")
    assert screen.code == 0, screen.err
    assert "--host 127.0.0.1" in screen.out
    for verb in ("serve", "serve-capture"):
        assert "[default: 127.0.0.1]" in " ".join(eyas(verb, "--help").out.split())
    source = "".join(path.read_text() for path in SOURCES)
    assert "0.0.0.0" not in source


# ---------------------------------------------------------------- secrets
@pytest.mark.parametrize(
    "setting",
    [
        f"regenerate.endpoint=http://me:{PASSWORD}@127.0.0.1:8000/v1",
        f"extract.endpoint=http://me:{PASSWORD}@127.0.0.1:8000/v1",
        f"target.model=https://me:{PASSWORD}@models.example/m",
        f"extract.states_dir=s3://key:{PASSWORD}@bucket/states",
        f"data.sources=[https://me:{PASSWORD}@data.example/d.jsonl]",
        f"regenerate.extra_body={{api_key: {PASSWORD}}}",
        f"vllm.engine_args=[hf_token={PASSWORD}]",
        f"target.model=https://models.example/m?token={PASSWORD}",
        f"target.revision={TOKEN}",
    ],
)
def test_a_secret_among_the_settings_is_refused_and_shown_nowhere(
    tiny_target: Path, tmp_path: Path, setting: str
) -> None:
    screen = eyas("run", "-c", write_run(tmp_path, tiny_target), setting)
    assert screen.code == 2
    first, second = screen.err.splitlines()
    assert first.startswith(f"error: {setting.partition('=')[0]}")
    assert "settings are written to run.yaml and the report" in first
    assert second.startswith("hint: leave ")
    assert PASSWORD not in screen.err + screen.out
    assert TOKEN not in screen.err + screen.out
    assert not (tmp_path / "run").exists()


def test_settings_that_look_a_little_like_secrets_are_taken(tiny_target: Path, tmp_path: Path) -> None:
    words = ("regenerate.extra_body={skip_special_tokens: true, max_tokens_per_word: 3}",
             "target.model=hf://owner/name@main", "regenerate.endpoint=http://me@127.0.0.1:8000/v1",
             "vllm.engine_args=[max_num_batched_tokens=8192]")  # fmt: skip
    assert eyas("config", "-c", write_run(tmp_path, tiny_target), *words).code == 0


def test_a_token_of_the_environment_is_in_no_file_and_no_line(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("HF_TOKEN", "OPENAI_API_KEY", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, TOKEN)
    caplog.set_level(logging.DEBUG)
    screen = eyas("run", "-c", write_run(tmp_path, tiny_target))
    assert screen.code == 0, screen.err
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert {"run.yaml", "stage.json", "report.html", "process.json"} <= {p.name for p in files}
    assert [p.name for p in files if TOKEN.encode() in p.read_bytes()] == []
    assert TOKEN not in screen.err + screen.out + caplog.text


def test_netrc_gives_an_endpoint_its_password(
    server: ThreadingHTTPServer, tiny_spec: TargetSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "netrc").write_text(f"machine 127.0.0.1 login me password {PASSWORD}\n")
    os.chmod(tmp_path / "netrc", 0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    url = f"http://127.0.0.1:{server.server_port}/v1"
    assert EndpointEngine(url, tiny_spec, None, end_of_turn_id=0).model == "model"
    wanted = base64.b64encode(f"me:{PASSWORD}".encode()).decode()
    assert _Server.seen == [f"Basic {wanted}"]


def test_serve_does_not_show_the_key_it_hands_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from eyas.console import shown
    from eyas.stages import serve as module

    started: list[list[str]] = []
    monkeypatch.setattr(
        module,
        "read_draft",
        lambda _: SimpleNamespace(architecture="eagle3", config={}, shape=None, aux_layer_ids=None),
    )
    for check in ("check_file", "check_port", "check_draft_heads"):
        monkeypatch.setattr(module, check, lambda *_: None)
    monkeypatch.setattr(module, "check_target", lambda *_: make_spec())
    monkeypatch.setattr(module, "check_memory", lambda *_: False)
    monkeypatch.setattr(module, "locate", lambda model, revision: Path(model))
    monkeypatch.setattr("eyas.engines.vllm.versions.check_draft_support", lambda *_: None)
    monkeypatch.setattr(os, "execvp", lambda _, words: started.append(words))
    extra = ("--api-key", PASSWORD, f"--hf-token={PASSWORD}", "--max-model-len", "512")
    with shown():
        serve(ServeOptions(Path("draft"), target="target", extra=extra), print_only=False)
    (words,) = started
    assert words[:2] == ["vllm", "serve"]
    assert tuple(words[-len(extra) :]) == extra
    shown = capsys.readouterr().err
    assert "--api-key '***' '--hf-token=***' --max-model-len 512" in shown
    assert PASSWORD not in shown


def test_reading_a_target_takes_no_trust_by_default(tiny_target: Path) -> None:
    from eyas.config.schema import TargetSettings

    assert TargetSettings(model=str(tiny_target)).trust_remote_code is False
    assert read_target(tiny_target, TargetSettings(model=str(tiny_target)))
