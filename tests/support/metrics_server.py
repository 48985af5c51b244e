"""A server as eyas sees SGLang: OpenAI completions of token ids, and counters of its own names.

It decodes with the real draft in this process, so its counts are true. Source of the forms: SGLang 0.5.23's
``CompletionResponse`` and ``SpecTokensDetails``.
"""

import itertools
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

import torch

from eyas.drafters.eagle3.propose import DraftChain
from eyas.evaluate.decode import decode_speculative
from eyas.export.native import load_export
from eyas.stages.run_context import RunContext
from eyas.targets.teacher import read_teacher


class SGLangServer:
    """Serves a finished run's draft; ``spoil`` changes an answer's ids before they are sent.

    ``in_replies``: each reply counts its rounds, as from 0.5.23 on, and there are no metrics.
    """

    def __init__(
        self, context: RunContext, num_draft_tokens: int, spoil: Any = None, in_replies: bool = False
    ) -> None:
        self.in_replies = in_replies
        teacher = read_teacher(context.target_folder, context.spec).to("cpu", torch.float32)
        self.draft, self.target_ids, _ = load_export(
            context.folder("export"), teacher.embedding, teacher.head
        )
        self.engine = context.make_engine("transformers")
        self.eos, self.k, self.spoil = context.spec.eos_token_ids, num_draft_tokens, spoil
        self.lock = threading.Lock()
        self.verify_calls = self.generated = 0
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_address[1]}/v1"

    def __enter__(self) -> "SGLangServer":
        self.thread = threading.Thread(target=self.http.serve_forever)
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        with self.lock:
            chain = DraftChain(self.draft, self.target_ids)
            ends = () if body.get("ignore_eos") else self.eos
            decoded = decode_speculative(
                self.engine.session(), chain, body["prompt"], self.k, body["max_tokens"], ends
            )
            assert decoded.acceptance is not None
            self.verify_calls += decoded.acceptance.num_rounds
            self.generated += len(decoded.token_ids)
        ids = self.spoil(decoded.token_ids) if self.spoil else decoded.token_ids
        reason = "stop" if ids[-1] in self.eos else "length"
        choice = {"finish_reason": reason, "text": "", "token_ids": ids, "prompt_token_ids": body["prompt"]}
        reply: dict[str, Any] = {"choices": [choice]}
        if self.in_replies and body.get("return_spec_tokens_details") and decoded.acceptance.num_rounds:
            at = (decoded.acceptance.num_rounds, *decoded.acceptance.accepted_at, 0)
            histogram = [more - fewer for more, fewer in itertools.pairwise(at)]
            reply["sglext"] = {
                "spec_tokens_details": {
                    "spec_verify_ct": decoded.acceptance.num_rounds,
                    "spec_num_correct_drafts": sum(decoded.acceptance.accepted_at),
                    "spec_num_proposed_drafts": self.k * decoded.acceptance.num_rounds,
                    "spec_correct_drafts_histogram": histogram,
                }
            }
        return reply

    def metrics(self) -> str:
        return (
            f'sglang:spec_accept_length{{model_name="m"}} 9.0\n'
            f'sglang:spec_verify_calls_total{{model_name="m"}} {self.verify_calls}.0\n'
            f'sglang:generation_tokens_total{{model_name="m"}} {self.generated}.0\n'
        )

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/metrics" and server.in_replies:
                    self.send_error(404)
                    return
                models = json.dumps({"data": [{"id": "m"}]})
                self.answer(server.metrics() if self.path == "/metrics" else models)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.answer(json.dumps(server.complete(body)))

            def answer(self, text: str) -> None:
                data = text.encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *arguments: Any) -> None:
                pass

        return Handler
