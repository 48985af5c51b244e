"""Facts of SGLang, whose server eyas does not start: ``eyas serve --print`` shows its command."""

import importlib.metadata
from collections.abc import Iterator
from typing import TYPE_CHECKING

from eyas.engines.info import DraftServer, EngineInfo, Installed
from eyas.findings import Finding

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


INFO = SglangInfo("sglang", "SGLang", serves=True)
