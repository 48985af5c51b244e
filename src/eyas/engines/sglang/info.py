"""Facts of SGLang, whose server eyas does not start: ``eyas serve --print`` shows its command."""

import importlib.metadata
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from eyas.engines.info import DraftServer, EngineInfo, Installed
from eyas.errors import UserError
from eyas.findings import Finding
from eyas.layer_ids import ReadLayers
from eyas.progress import say

if TYPE_CHECKING:
    from eyas.config.schema import RunConfig


class SglangInfo(EngineInfo):
    def installed(self) -> Installed:
        try:
            return Installed(importlib.metadata.version(self.name))
        except importlib.metadata.PackageNotFoundError:
            return Installed(None, "the engine sglang is not installed", "pip install sglang")

    def findings(self, config: "RunConfig | None", wanted: bool) -> Iterator[Finding]:
        version = self.installed().version
        yield Finding(self.name, "ok", version or "is not installed (eyas prints its command only)")

    def short_command(self, kind: str, target: str, num_draft_tokens: int) -> str:
        words = self.draft_file(kind).arguments("THIS_FOLDER", num_draft_tokens)
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
        return [
            *("python", "-m", "sglang.launch_server", "--model-path", server.target, "--dtype", server.dtype),
            *self.draft_file(server.kind).arguments(draft, server.num_draft_tokens),
            *(("--tp", str(server.tp_size)) if server.tp_size > 1 else ()),
            *(("--trust-remote-code",) if server.trust_remote_code else ()),
            *(("--revision", server.revision) if server.revision else ()),
            *("--mem-fraction-static", str(server.gpu_memory_utilization)),
            *("--enable-metrics", "--host", server.host, "--port", str(server.port), *server.extra),
        ]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


INFO = SglangInfo("sglang", "SGLang", serves=True)
