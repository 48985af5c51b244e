"""Facts of SGLang: its version, and the commands of its server."""

import importlib.metadata
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.engines.info import DraftServer, EngineInfo, Installed
from eyas.errors import UserError
from eyas.findings import Finding
from eyas.layer_ids import ReadLayers
from eyas.progress import say

if TYPE_CHECKING:
    from eyas.config.schema import RunConfig
    from eyas.types import TargetSpec

# The oldest that was read and whose completions hold token ids and counts of rounds; 0.5.14 has neither.
_COUNTS_IN_REPLIES = "0.5.23"


class SglangInfo(EngineInfo):
    def installed(self) -> Installed:
        try:
            return Installed(importlib.metadata.version(self.name))
        except importlib.metadata.PackageNotFoundError:
            return Installed(None, "the engine sglang is not installed", "pip install sglang")

    def findings(self, config: "RunConfig | None", wanted: bool) -> Iterator[Finding]:
        version = self.installed().version
        yield Finding(
            self.name,
            "ok",
            version or "is not installed (eyas serve --engine sglang --print shows its command)",
        )

    def gpus(self, config: "RunConfig") -> int:
        return 1

    def check_server(self, server: DraftServer, spec: "TargetSpec") -> None:
        import torch

        found = self.installed()
        trouble = found.trouble or (
            None if torch.cuda.is_available() else "SGLang serves drafts on a GPU, and there is none here"
        )
        if trouble is not None:
            raise UserError(trouble, hint="add --print, and run the command where SGLang and a GPU are")

    def start_decoder(self, config: "RunConfig", folder: Path, spec: "TargetSpec", **settings: Any) -> Any:
        here = self._check_installed()
        if _numbers(here) < _numbers(_COUNTS_IN_REPLIES):
            raise UserError(
                f"SGLang {here} says neither an answer's token ids nor its rounds over HTTP",
                hint=f"pip install 'sglang>={_COUNTS_IN_REPLIES}'",
            )
        if settings["draft"] is not None:
            kind = config.draft.architecture
            self._check_num_draft_tokens(kind, settings["draft"], settings["num_draft_tokens"])
        return super().start_decoder(config, folder, spec, **settings)

    def _check_num_draft_tokens(self, kind: str, draft: Path, num_draft_tokens: int) -> None:
        check = getattr(self.draft_file(kind), "check_num_draft_tokens", lambda draft, num: None)
        check(str(draft), num_draft_tokens)

    def _check_installed(self) -> str:
        found = self.installed()
        if found.version is None:
            assert found.trouble is not None
            raise UserError(found.trouble, found.hint)
        return found.version

    def short_command(self, kind: str, target: str, num_draft_tokens: int, draft: Path) -> str:
        words = self.draft_file(kind).arguments(str(draft), num_draft_tokens)
        words = ["THIS_FOLDER" if word == str(draft) else word for word in words]
        pairs = [" ".join(words[i : i + 2]) for i in range(0, len(words), 2)]
        lines = [f"python -m sglang.launch_server --model-path {target} {pairs[0]}"]
        lines += [f"  {' '.join(pairs[i : i + 2])}" for i in range(1, len(pairs), 2)]
        return " \\\n".join(lines)

    def least_version(self, kind: str, layers: ReadLayers) -> str | None:
        oldest: str = self.draft_file(kind).oldest(layers)
        return oldest

    def check_version(self, kind: str, layers: ReadLayers | None) -> None:
        """Say which versions serve the draft as it was trained; refuse the one here if it is older."""
        if layers is None:
            return
        oldest, here = self.least_version(kind, layers), self.installed().version
        assert oldest is not None
        if here is not None and _numbers(here) < _numbers(oldest):
            raise UserError(
                f"SGLang {here} would serve this draft wrongly, without an error",
                hint=f"pip install 'sglang>={oldest}'",
            )
        say(f"serve: this draft needs SGLang {oldest} or later")

    def serve_command(self, server: DraftServer, on_cpu: bool) -> list[str]:
        draft = str(server.draft.resolve())
        self._check_num_draft_tokens(server.kind, server.draft, server.num_draft_tokens)
        return [
            *("python", "-m", "sglang.launch_server", "--model-path", server.target, "--dtype", server.dtype),
            *self.draft_file(server.kind).arguments(draft, server.num_draft_tokens),
            *(("--tp", str(server.tp_size)) if server.tp_size > 1 else ()),
            *(("--trust-remote-code",) if server.trust_remote_code else ()),
            *(("--revision", server.revision) if server.revision else ()),
            # Its own share of memory stays: --mem-fraction-static counts other things than vLLM's share.
            # Else penalties and filters of the model's generation_config.json change the target's answers.
            *("--sampling-defaults", "openai", "--enable-metrics"),
            *("--host", server.host, "--port", str(server.port), *server.extra),
        ]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


INFO = SglangInfo(
    "sglang",
    "SGLang",
    decoder="eyas.engines.sglang.decoder:SglangDecoder",
    serves=True,
)
