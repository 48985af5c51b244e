"""A small OpenAI-compatible server on this machine, with the troubles that real ones have."""

import asyncio
import json
import threading
from collections import Counter
from types import TracebackType
from typing import Any

_RENDERINGS = {
    "/tokenize": "tokens",
    "/v1/chat/completions/render": "token_ids",
    "/v1/chat/completions": "prompt_token_ids",
}


class FakeServer:
    """Answers /v1/models, /v1/completions and /tokenize; every attribute may be set before it is used."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.models = ["target"]
        self.parents: dict[str, str] = {}  # of models that are adapters
        self.lag: float | None = 0.0  # of a token behind the likeliest; None: no log-probabilities
        self.returns_ids = True
        self.refused_fields: set[str] = set()
        self.hold_until_in_flight = 0  # answers wait until so many requests are in flight
        self.troubles: list[int] = []  # HTTP states of the next answers; 0 closes the connection
        self.failing_prompts: set[tuple[int, ...]] = set()
        self.finish_reason = "stop"
        self.answers: Counter[tuple[int, ...]] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.rendered: list[int] | None = None
        self.renders_at = "/tokenize"
        self.most_in_flight = 0
        self._in_flight = 0

    def __enter__(self) -> "FakeServer":
        self._loop = asyncio.new_event_loop()
        self._enough = asyncio.Event()
        started = threading.Event()

        async def serve() -> None:
            self._server = await asyncio.start_server(self._connection, "127.0.0.1", 0, backlog=4096)
            started.set()

        def run() -> None:
            asyncio.set_event_loop(self._loop)
            self._loop.run_until_complete(serve())
            self._loop.run_forever()
            self._server.close()
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._loop.run_until_complete(asyncio.sleep(0.05))
            self._loop.close()

        self._thread = threading.Thread(target=run)
        self._thread.start()
        started.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"

    def answer_ids(self, prompt: tuple[int, ...]) -> list[int]:
        """Return the answer to a prompt: always the same, and another for another prompt."""
        text = f"The answer is {sum(prompt) % 9973} of {len(prompt)}."
        return [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                path = line.split()[1].decode()
                length = 0
                while (header := await reader.readline()).strip():
                    name, _, value = header.partition(b":")
                    length = int(value) if name.lower() == b"content-length" else length
                body = json.loads(await reader.readexactly(length)) if length else {}
                status, reply = await self._reply(path, body)
                if not status:
                    break
                data = json.dumps(reply).encode()
                writer.write(
                    f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\n"
                    f"Content-Length: {len(data)}\r\n\r\n".encode()
                    + data
                )
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _reply(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"data": [{"id": name, "parent": self.parents.get(name)} for name in self.models]}
        for known, key in _RENDERINGS.items():
            if path == known:
                offered = self.rendered is not None and known == self.renders_at
                return (200, {key: self.rendered}) if offered else (404, {})
        if path != "/v1/completions":
            return 404, {}
        if "logprobs" in body:  # a first look, which is not counted
            return self._complete(body)
        self._in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._in_flight)
        if self._in_flight >= self.hold_until_in_flight:
            self._enough.set()
        await self._enough.wait()
        await asyncio.sleep(0)
        self._in_flight -= 1
        return self._complete(body)

    def _complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        looks = "logprobs" in body
        if not looks:
            self.bodies.append(body)
        refused = self.refused_fields & set(body)
        if refused:
            return 400, {"error": f"unknown field {min(refused)}"}
        if self.troubles and not looks:
            return self.troubles.pop(), {"error": "busy"}
        prompt = tuple(body["prompt"])
        if prompt in self.failing_prompts:
            return 400, {"error": "this prompt is not liked"}
        self.answers[prompt] += not looks
        ids = self.answer_ids(prompt)
        choice: dict[str, Any] = {
            "finish_reason": self.finish_reason,
            "text": self.tokenizer.decode(ids[:-1]),
        }
        if self.finish_reason == "length":
            ids = ids[:-1]
        if self.returns_ids:
            choice |= {"token_ids": ids, "prompt_token_ids": list(prompt)}
        if looks and self.lag is not None:
            steps = [-1.0 - self.lag] * len(ids)
            choice["logprobs"] = {"token_logprobs": steps, "top_logprobs": [{"likeliest": -1.0}] * len(ids)}
        return 200, {"choices": [choice]}
