"""serve: start an engine with a draft, after checking that target, draft, engine and machine fit together.

All checks are done before a weight of the target is loaded.
"""

import os
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from eyas.config.schema import TargetSettings
from eyas.config.secrets import without_secrets
from eyas.drafters.common.stored import StoredDraft
from eyas.engines.checks import check_draft_heads
from eyas.engines.info import DraftServer, engine_info
from eyas.errors import UserError
from eyas.export.read import read_draft
from eyas.progress import say
from eyas.provenance import stage_states
from eyas.registry import SERVING_ENGINE
from eyas.run_folder import draft_folder_of, readable_records_of
from eyas.serving.fit import (
    check_file,
    check_memory,
    check_port,
    check_target,
    recorded_layers,
    recorded_target,
)
from eyas.targets.resolve_model import locate


@dataclass(frozen=True)
class ServeOptions:
    """``target`` None: the one the draft was trained for. ``extra`` words go to the engine as they are."""

    draft: Path
    target: str | None = None
    engine: str = SERVING_ENGINE
    num_draft_tokens: int = 3
    host: str = "127.0.0.1"
    port: int = 8000
    tp_size: int = 1
    gpu_memory_utilization: float = 0.9
    dtype: str | None = None
    trust_remote_code: bool = False
    extra: tuple[str, ...] = ()


def serve(options: ServeOptions, print_only: bool) -> None:
    """Check everything, then become the engine; or print the command that would.

    Raises: UserError naming the first thing that does not fit.
    """
    options = replace(options, draft=draft_folder_of(options.draft))
    stored = read_draft(options.draft)
    check_file(options.draft, stored)
    warn_of_stale(options.draft)
    name = options.target or recorded_target(stored).get("model")
    if name is None:
        raise UserError(
            f"{options.draft} does not say which target it was trained for", hint="name it with --target"
        )
    settings = TargetSettings(
        model=str(name),
        # Another target than the recorded one has other revisions.
        revision=None if options.target else recorded_target(stored).get("revision"),
        trust_remote_code=options.trust_remote_code,
    )
    spec = check_target(options.draft, stored, settings, print_only)
    info, server = engine_info(options.engine), _server(options, stored, settings)
    layers = recorded_layers(stored)
    info.check_draft(server.kind, stored.shape, layers)
    if print_only:
        info.check_version(server.kind, layers)
        print(shlex.join(info.serve_command(server, on_cpu=False)))
        return
    assert spec is not None
    info.check_server(server, spec)
    info.check_version(server.kind, layers)
    check_draft_heads(stored.shape, options.tp_size, "--tp-size")
    check_port(options.host, options.port)
    folder = locate(settings.model, settings.revision)
    on_cpu = check_memory(folder, server, info.title)
    words = info.serve_command(replace(server, target=str(folder), revision=None), on_cpu)
    say(f"serve: {shlex.join(without_secrets(words))}")
    if words[0] == "python":
        words[0] = sys.executable  # the one whose packages were checked
    os.execvp(words[0], words)


def warn_of_stale(draft: Path) -> None:
    """Say so where the draft of a run folder is older than what the run holds now."""
    run_dir = draft.resolve().parent
    if (run_dir / "run.yaml").is_file() and (
        cause := stage_states(readable_records_of(run_dir))["export"].cause
    ):
        say(f"serve: warning: {draft} is stale: {cause}")
        say(f"  for the newest one: eyas export --fresh -c {run_dir / 'run.yaml'}")


def _server(options: ServeOptions, stored: StoredDraft, target: TargetSettings) -> DraftServer:
    return DraftServer(
        draft=options.draft,
        kind=stored.architecture,
        target=target.model,
        trust_remote_code=target.trust_remote_code,
        revision=target.revision,
        num_draft_tokens=options.num_draft_tokens,
        dtype=options.dtype or recorded_target(stored).get("dtype") or "auto",
        host=options.host,
        port=options.port,
        tp_size=options.tp_size,
        gpu_memory_utilization=options.gpu_memory_utilization,
        extra=options.extra,
    )
