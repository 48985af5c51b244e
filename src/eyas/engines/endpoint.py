"""Answers from an OpenAI-compatible server, many requests in flight; token ids go in and come out."""

import asyncio
import random
import resource
import zlib
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import httpx

from eyas.engines.base import Prompt, Sampling
from eyas.engines.netrc_auth import from_netrc
from eyas.errors import ContractError, UserError
from eyas.types import Completion, Failure, TargetSpec

_ATTEMPTS = 6
_LONGEST_PAUSE_S = 20.0
_OTHER_FILES = 256
_WORKERS_PER_CLIENT = 16
_CONNECT_S = 60.0
# vLLM's additions to the protocol.
_EXTENSIONS = {"return_token_ids": True, "skip_special_tokens": False, "add_special_tokens": False}
# The target's distribution as it is. Servers fill what a request leaves out from generation_config.json.
NEUTRAL = {
    "top_p": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
_LOGPROBS = {"logprobs": 1, "return_tokens_as_token_ids": True}
# What the stage itself decides; another value here would make the records untrue.
_OURS = ("prompt", "max_tokens", "temperature", "seed", "stop", "n", "stream", "echo")


class EndpointEngine:
    """Generates with a server; ``end_of_turn_id`` is the token that a server leaves out of its text.

    ``num_retokenized`` counts answers that came back as text only and were tokenized again, which
    is right unless the target spelled a word in an unusual way. A field of a request that the server
    refuses is left out from then on; ``refused`` names these. ``asks`` are further fields of a subclass.
    """

    asks: Mapping[str, Any] = {}

    def __init__(
        self,
        url: str,
        spec: TargetSpec,
        tokenizer: Any,
        *,
        end_of_turn_id: int,
        concurrency: int = 1024,
        timeout_s: float = 1800,
        extra_body: Mapping[str, Any] | None = None,
    ) -> None:
        self.url, self._auth = url.rstrip("/"), from_netrc()
        self.spec, self.tokenizer = spec, tokenizer
        self.end_of_turn_id = end_of_turn_id
        self.timeout_s = timeout_s
        self.extra_body = dict(extra_body or {})
        self.num_retokenized = 0
        self.refused: set[str] = set()
        self._lags: dict[str, float] | None = None
        taken = [key for key in _OURS if key in self.extra_body]
        if taken:
            raise UserError(
                f"regenerate.extra_body sets {taken[0]!r}, which eyas sets itself",
                hint="use regenerate.max_new_tokens, regenerate.temperature or seed",
            )
        self.model = self._served_model(self.extra_body.pop("model", None))
        self.concurrency = _allow_connections(concurrency)

    def check_rendering(self, messages: Sequence[Any], tools: Any, kwargs: Any, ours: Sequence[int]) -> bool:
        """Compare a prompt's ids with the server's own rendering; False when the server cannot tell.

        Raises: ContractError when they differ.
        """
        body = {"model": self.model, "messages": messages, "add_generation_prompt": True}
        body |= {"tools": tools} if tools else {}
        body |= {"chat_template_kwargs": kwargs} if kwargs else {}
        chat, one = f"{self.url}/chat/completions", {"max_tokens": 1, "return_token_ids": True}
        theirs = (
            self._rendered(f"{chat}/render", "token_ids", body)
            or self._rendered(f"{self.url.removesuffix('/v1')}/tokenize", "tokens", body)
            or self._rendered(chat, "prompt_token_ids", body | one)
        )
        if theirs is None:
            return False
        if list(theirs) != list(ours):
            at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), -1)
            raise ContractError(
                f"the server renders a prompt to {len(theirs)} tokens, this run to {len(ours)}; "
                f"the first difference is at token {at if at >= 0 else min(len(theirs), len(ours))}",
                hint="serve the target's own chat template, or set data.template_kwargs as the server does",
            )
        return True

    def generate(self, prompts: Iterable[Prompt], sampling: Sampling) -> Iterator[Completion | Failure]:
        """Answer prompts in the order that the server finishes them."""
        with asyncio.Runner() as runner:
            answers = self._answers(list(prompts), sampling)

            async def following() -> Completion | Failure | None:
                return await anext(answers, None)

            try:
                while (item := runner.run(following())) is not None:
                    yield item
            finally:
                runner.run(answers.aclose())

    def greedy_answers(
        self, prompts: Iterable[Prompt], max_new_tokens: int
    ) -> tuple[list[Completion | Failure], dict[str, float]]:
        """Answer greedily; also return by prompt how far a token of the answer was below the likeliest one.

        Units: log-probability, by the server's own account of each step. A prompt that it gave none for is
        left out. Penalties and filters change which token is taken, and not these log-probabilities.
        """
        lags: dict[str, float] = {}
        self._lags = lags
        try:
            return list(self.generate(prompts, Sampling(max_new_tokens))), lags
        finally:
            self._lags = None

    def close(self) -> None:
        pass

    async def _answers(
        self, prompts: list[Prompt], sampling: Sampling
    ) -> AsyncGenerator[Completion | Failure, None]:
        waiting = iter(prompts)
        done: asyncio.Queue[Completion | Failure | BaseException] = asyncio.Queue()
        # httpx looks at every connection of a client for every request, so that one client with
        # thousands is slow; a few connections each is not.
        num_workers = min(self.concurrency, len(prompts))
        tls = httpx.create_ssl_context()
        limit = httpx.Timeout(self.timeout_s, connect=_CONNECT_S)
        clients = [
            httpx.AsyncClient(
                verify=tls,
                timeout=limit,
                limits=httpx.Limits(max_connections=_WORKERS_PER_CLIENT),
                auth=self._auth,
            )
            for _ in range(-(-num_workers // _WORKERS_PER_CLIENT))
        ]

        async def work(client: httpx.AsyncClient) -> None:
            for prompt in waiting:
                try:
                    done.put_nowait(await self._answer(client, prompt, sampling))
                except Exception as error:
                    done.put_nowait(error)

        workers = [asyncio.create_task(work(clients[i // _WORKERS_PER_CLIENT])) for i in range(num_workers)]
        try:
            for _ in prompts:
                item = await done.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            for client in clients:
                await client.aclose()

    async def _answer(
        self, client: httpx.AsyncClient, prompt: Prompt, sampling: Sampling
    ) -> Completion | Failure:
        room = self.spec.max_position_embeddings - len(prompt.token_ids)
        if room < 1:
            return Failure(prompt.prompt_id, "the prompt fills the target's context")
        body = {
            "model": self.model,
            "prompt": list(prompt.token_ids),
            "max_tokens": min(sampling.max_new_tokens, room),
            "temperature": sampling.temperature,
            # One seed a prompt, so that like prompts do not get like noise.
            "seed": zlib.crc32(f"{sampling.seed}:{prompt.prompt_id}".encode()),
        }
        looks = self._lags is not None
        further = _EXTENSIONS | NEUTRAL | dict(self.asks) | (_LOGPROBS if looks else {})
        chosen = {k: v for k, v in self.extra_body.items() if not (looks and k in NEUTRAL)}
        trouble = "no answer"
        for attempt in range(_ATTEMPTS):
            taken = {key: value for key, value in further.items() if key not in self.refused}
            try:
                reply = await client.post(f"{self.url}/completions", json=body | taken | chosen)
            except httpx.TransportError as error:
                trouble = f"{type(error).__name__} {error}".strip()
            else:
                if reply.is_success:
                    return self._completion(prompt, reply)
                trouble = f"HTTP {reply.status_code}: {' '.join(reply.text.split())[:200]}"
                if reply.status_code in (400, 422) and any(key in reply.text for key in taken):
                    # A server may name only the first of several fields.
                    # It takes all of vLLM's additions or none.
                    named = {key for key in taken if key in reply.text}
                    self.refused |= named | (_EXTENSIONS.keys() if named & _EXTENSIONS.keys() else set())
                    continue
                if reply.status_code < 500 and reply.status_code not in (408, 425, 429):
                    break
            if attempt + 1 < _ATTEMPTS:
                await asyncio.sleep(min(_LONGEST_PAUSE_S, 0.5 * 2**attempt) * random.uniform(0.5, 1))
        return Failure(prompt.prompt_id, trouble)

    def _completion(self, prompt: Prompt, reply: httpx.Response) -> Completion | Failure:
        try:
            choice = reply.json()["choices"][0]
            reason, text = choice["finish_reason"], choice["text"]
        except (ValueError, LookupError, TypeError):
            return Failure(prompt.prompt_id, f"not a completion: {' '.join(reply.text.split())[:200]}")
        echoed = choice.get("prompt_token_ids")
        if echoed and tuple(echoed) != prompt.token_ids:
            raise ContractError(f"the server read other tokens than it was sent for {prompt.prompt_id}")
        if reason not in ("stop", "length"):
            return Failure(prompt.prompt_id, f"finish reason {reason!r}")
        ids = choice.get("token_ids")
        if ids is None:
            self.num_retokenized += self._lags is None
            ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        ids = tuple(ids)
        if self._lags is not None and (lag := _lag(choice.get("logprobs"))) is not None:
            self._lags[prompt.prompt_id] = lag
        if reason == "stop" and not (ids and ids[-1] in self.spec.eos_token_ids):
            # The server generated an end-of-turn, for nothing else was to stop it, and left it out.
            stopped_by = choice.get("stop_reason", choice.get("matched_stop"))  # vLLM's name, SGLang's
            ids += (stopped_by if isinstance(stopped_by, int) else self.end_of_turn_id,)
        return Completion(prompt.prompt_id, ids, reason)

    def _rendered(self, url: str, key: str, body: dict[str, Any]) -> list[int] | None:
        """Ask one of the two addresses under which vLLM, by version, shows what it makes of messages."""
        try:
            reply = httpx.post(url, json=body, timeout=60, auth=self._auth)
            value = reply.json().get(key) if reply.is_success else None
        except (httpx.HTTPError, ValueError, AttributeError):
            return None
        return value if isinstance(value, list) else None

    def _served_model(self, asked: str | None) -> str:
        """Return the model that is asked for, or the only one that the server has besides its adapters.

        Raises: UserError when it cannot be reached, has several, or the model is an adapter (LoRA).
        """
        try:
            reply = httpx.get(f"{self.url}/models", timeout=30, auth=self._auth)
            reply.raise_for_status()
            parents = {str(model["id"]): model.get("parent") for model in reply.json()["data"]}
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
            raise UserError(
                f"regenerate.endpoint={self.url} does not answer /models: {type(error).__name__} {error}",
                hint="the address of an OpenAI-compatible server ends in /v1, e.g. http://127.0.0.1:8000/v1",
            ) from None
        names = [name for name, parent in parents.items() if parent is None]
        if asked is None and len(names) != 1:
            raise UserError(
                f"the server has {len(names)} models: {', '.join(names[:5])}",
                hint="choose one with regenerate.extra_body={model: NAME}",
            )
        name = names[0] if asked is None else asked
        if parents.get(name) is not None:
            raise UserError(
                f"the server's {name} is an adapter (LoRA) of {parents[name]}, which is not the target",
                hint=f"set regenerate.extra_body={{model: {parents[name]}}}, or merge the adapter into the "
                "target and name the merged folder in target.model",
            )
        return name


def _lag(logprobs: Any) -> float | None:
    """Return how far the chosen token was below the likeliest one, at the step where that is most."""
    try:
        pairs = zip(logprobs["top_logprobs"], logprobs["token_logprobs"], strict=True)
        return max((max(top.values()) - chosen for top, chosen in pairs if top), default=0.0)
    except (LookupError, TypeError, ValueError, AttributeError):
        return None


def _allow_connections(wanted: int) -> int:
    """Raise this process's limit of open files, often 1024, as far as needed; return what it allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return max(1, min(wanted, soft - _OTHER_FILES))
    return wanted
