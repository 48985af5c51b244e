"""A vLLM server that somebody else has started captures: prompts go over HTTP, states come as files."""

import contextlib
import os
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import httpx
import psutil

from eyas.engines.netrc_auth import from_netrc
from eyas.engines.vllm.engine_args import captured_layers
from eyas.engines.vllm.state_transfer import (
    FACTS_KEY,
    NAME_KEY,
    STAGING_FORMAT,
    WITNESS_KEY,
    WITNESS_PREFIX,
    Finished,
    take_states,
)
from eyas.engines.vllm.versions import DEPENDABLE, native_trouble, parse
from eyas.errors import ContractError, EyasError, UserError
from eyas.types import TargetSpec

_ATTEMPTS = 3
_PAUSE_S = 1.0
_ANSWER_S = 1800.0
_FIRST_FILE_S = 10.0
_SHOWN = "the command that eyas serve-capture --print shows for this run"


class ServerSession:
    """A server at ``url`` (ending in /v1), held to the target and the layers of this run before any work.

    ``folder`` is where its files are found on this machine; by default where the server says it writes.
    """

    def __init__(
        self, url: str, spec: TargetSpec, *, folder: Path | None, max_length: int, in_flight: int
    ) -> None:
        self.url, self.spec = url.rstrip("/"), spec
        self.layer_ids = captured_layers(spec)
        self._folder = folder
        # No other client of the server may write under our names, nor take our files.
        self._mark = f"{socket.gethostname().partition('.')[0]}-{os.getpid()}-{os.urandom(3).hex()}"
        self._tls, self._auth = httpx.create_ssl_context(), from_netrc()
        self._clients, self._made = threading.local(), list[httpx.Client]()
        self._closing = threading.Event()
        self._open: set[Future[Finished]] = set()
        self._pool = ThreadPoolExecutor(in_flight, "eyas-ask")
        try:
            self.model = self._served_model(max_length)
            self.num_ranks = self._shake_hands()
            self._remove_left_overs()
        except BaseException:  # a server that is refused
            self.close()
            raise

    def submit(self, name: str, token_ids: Sequence[int], probe_output: bool) -> None:
        """Ask for one prompt's states, in a file of that name and our mark."""
        self._open.add(self._pool.submit(self._ask, name, list(token_ids), probe_output))

    def has_output(self) -> bool:
        """Whether ``finished`` would return at once."""
        return any(future.done() for future in self._open)

    def finished(self) -> list[Finished]:
        """Wait for answers and return them. Raises: EyasError when the server is gone."""
        done, self._open = wait(self._open, timeout=1.0, return_when=FIRST_COMPLETED)
        return [future.result() for future in done]

    def abort(self, names: Sequence[str]) -> None:
        """Forget what was asked for; files that still come are removed in the end."""
        for future in self._open:
            future.cancel()
        self._open = set()

    def nudge(self) -> None:
        pass

    def close(self) -> None:
        self._closing.set()
        self._pool.shutdown(cancel_futures=True)
        for client in self._made:
            client.close()
        if self._folder is not None and self._folder.is_dir():
            for path in self._folder.iterdir():
                if self._mark in path.name:
                    path.unlink(missing_ok=True)

    # ------------------------------------------------------------- one request
    def _ask(self, name: str, token_ids: list[int], probe_output: bool) -> Finished:
        reply = self._post(name, token_ids, probe_output)
        try:
            choice = reply["choices"][0]
            reason, token = str(choice["finish_reason"]), int(choice["token_ids"][0])
            logprob = float(choice["logprobs"]["token_logprobs"][0]) if probe_output else None
        except (LookupError, TypeError, ValueError) as error:
            raise ContractError(f"{self.url} answered no completion of one token: {error!r}") from None
        return Finished(name, self._path_of(reply), reason, token, logprob)

    def _post(self, name: str, token_ids: list[int], probe_output: bool) -> dict[str, Any]:
        """Raises: EyasError when the server does not answer, or not with what was asked for."""
        client = getattr(self._clients, "own", None)
        if client is None:  # one connection a thread: httpx's pool is slow with many
            client = self._clients.own = httpx.Client(
                verify=self._tls, timeout=httpx.Timeout(_ANSWER_S, connect=30), auth=self._auth
            )
            self._made.append(client)
        body = {
            "model": self.model,
            "prompt": token_ids,
            "max_tokens": 1,
            "temperature": 0.0,
            "ignore_eos": True,
            "add_special_tokens": False,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "logprobs": 1 if probe_output else None,
            "vllm_xargs": {NAME_KEY: self._file_name(name), WITNESS_KEY: int(probe_output)},
        }
        trouble = ""
        for attempt in range(_ATTEMPTS):
            if attempt and self._closing.wait(_PAUSE_S):
                break
            try:
                reply = client.post(f"{self.url}/completions", json=body)
            except httpx.TransportError as error:
                trouble = f"{type(error).__name__} {error}".strip()
                continue
            if reply.is_success:
                return dict(reply.json())
            trouble = f"HTTP {reply.status_code}: {' '.join(reply.text.split())[:200]}"
            if reply.status_code < 500:
                break
        raise EyasError(
            f"the server at {self.url} failed: {trouble}",
            hint="complete shards are kept: mend or restart it and run the same command again",
        )

    def _file_name(self, name: str) -> str:
        prefix = WITNESS_PREFIX if name.startswith(WITNESS_PREFIX) else "sample-"
        return f"{prefix}{self._mark}-{name.rpartition('-')[2]}"

    def _path_of(self, reply: dict[str, Any]) -> Path | None:
        params = reply.get("kv_transfer_params") or {}
        if FACTS_KEY not in params or "hidden_states_path" not in params:
            return None
        there = Path(params["hidden_states_path"])
        if self._mark not in there.name:  # it is read and removed, so it must be one that we asked for
            return None
        return (self._folder or there.parent) / there.name

    # ------------------------------------------------------------- before any work
    def _served_model(self, max_length: int) -> str:
        try:
            reply = httpx.get(f"{self.url}/models", timeout=30, verify=self._tls, auth=self._auth)
            reply.raise_for_status()
            served = reply.json()["data"][0]
            name, longest = str(served["id"]), served.get("max_model_len")
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
            said = " ".join(str(error).split())
            raise UserError(
                f"extract.endpoint={self.url} does not answer /models: {type(error).__name__} {said}",
                hint=f"start {_SHOWN}; the address ends in /v1, e.g. http://127.0.0.1:8000/v1",
            ) from None
        if longest is not None and longest < max_length + 1:
            raise UserError(
                f"the server at {self.url} takes {longest} positions; samples of data.max_length="
                f"{max_length} need {max_length + 1}",
                hint=f"restart it with {_SHOWN}, or set data.max_length={longest - 1}",
            )
        return name

    def _shake_hands(self) -> int:
        """Have one token captured and hold the server to this run; return its number of ranks."""
        reply = self._post("sample-hello", [self.spec.eos_token_ids[0]], probe_output=False)
        path = self._path_of(reply)
        if path is None:
            raise UserError(
                f"the server at {self.url} was not started for capture: it names no file of states",
                hint=f"restart it with {_SHOWN}",
            )
        if not path.parent.is_dir():
            raise UserError(
                f"the server writes states to {path.parent}, which is not there on this machine",
                hint="set vllm.staging_dir to a folder that both see, for the server and for this command",
            )
        facts = reply["kv_transfer_params"][FACTS_KEY]
        if facts.get("staging") != STAGING_FORMAT:
            raise UserError(
                f"the server at {self.url} was started by another version of eyas",
                hint=f"restart it with {_SHOWN}",
            )
        try:
            take_states(path, _FIRST_FILE_S, self._closing)
        except ContractError as error:
            raise UserError(
                f"the server's first file of states did not come to {path.parent}: {error.what}",
                hint="set vllm.staging_dir to a folder that both see, for the server and for this command",
            ) from None
        self._folder = path.parent
        self._check_facts(facts)
        return int(facts["num_ranks"])

    def _check_facts(self, facts: dict[str, Any]) -> None:
        spec = self.spec
        for key in ("num_layers", "hidden_size", "dtype"):
            if facts[key] != getattr(spec, key):
                raise UserError(
                    f"the server at {self.url} runs another model: its {key} is {facts[key]}, "
                    f"the target's {getattr(spec, key)}",
                    hint=f"restart it with {_SHOWN}, or set target.model to the one it serves",
                )
        if facts["target"] != spec.weights_fingerprint:
            raise UserError(
                f"the server at {self.url} was started for other weights than those of {spec.model}",
                hint=f"restart it with {_SHOWN}, or set target.model to the one it serves",
            )
        if tuple(facts["layer_ids"]) != self.layer_ids:
            raise UserError(
                f"the server at {self.url} captures layers {facts['layer_ids']}, "
                f"this run needs {list(self.layer_ids)}",
                hint=f"restart it with {_SHOWN}, or set target.aux_layer_ids={facts['layer_ids'][:-1]}",
            )
        version = parse(facts["vllm"])
        trouble = native_trouble(version, spec, int(facts["num_ranks"]))
        if trouble is None and facts["prefix_caching"] and version < DEPENDABLE:
            trouble = "loses the states of cached prefixes"
        if trouble:
            raise UserError(
                f"the server at {self.url} is vLLM {facts['vllm']}, which {trouble}",
                hint=f"restart it with {_SHOWN}, under a newer vLLM",
            )

    def _remove_left_overs(self) -> None:
        """Remove what clients on this machine left that were killed."""
        host = self._mark.partition("-")[0]
        assert self._folder is not None
        for path in self._folder.iterdir():
            pid = path.name.partition(f"-{host}-")[2].partition("-")[0]
            if pid.isdigit() and not psutil.pid_exists(int(pid)):
                with contextlib.suppress(OSError):
                    path.unlink()
