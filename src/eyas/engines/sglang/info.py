"""Facts of SGLang, whose server eyas does not start: ``eyas serve --print`` shows its command."""

import importlib.metadata
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from eyas import registry
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

    def draft_trouble(self, kind: str, shape: Any) -> str | None:
        trouble: str | None = registry.drafter_file(kind, self.name).trouble(shape)
        return trouble

    def serve_command(self, server: DraftServer, on_cpu: bool) -> list[str]:
        draft = str(server.draft.resolve())
        module = registry.drafter_file(server.kind, self.name)
        return [
            *("python", "-m", "sglang.launch_server", "--model-path", server.target, "--dtype", server.dtype),
            *module.arguments(draft, server.num_draft_tokens, server.config),
            *(("--tp", str(server.tp_size)) if server.tp_size > 1 else ()),
            *("--mem-fraction-static", str(server.gpu_memory_utilization)),
            *("--enable-metrics", "--host", server.host, "--port", str(server.port), *server.extra),
        ]


INFO = SglangInfo("sglang", "SGLang", serves=True)
