"""Facts of vLLM: its GPUs, its share of their memory, its version, and the commands of its servers."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from eyas.engines.info import CaptureServer, DraftServer, EngineInfo, Installed, TargetSize
from eyas.errors import UserError
from eyas.findings import Finding

if TYPE_CHECKING:
    from eyas.config.schema import RunConfig
    from eyas.engines.vllm.baselines import Baseline
    from eyas.types import TargetSpec

_REMEDY = "pip install 'eyas[vllm]', or set extract.engine=transformers"
_BACKEND = "distributed_executor_backend"


class VllmInfo(EngineInfo):
    def installed(self) -> Installed:
        from eyas.engines.vllm import versions

        try:
            versions.installed_version()
        except UserError as error:
            version = versions.version_text() if versions.is_installed() else None
            return Installed(version, error.what, error.hint)
        return Installed(versions.version_text())

    def findings(self, config: "RunConfig | None", wanted: bool) -> Iterator[Finding]:
        from eyas.engines.vllm import versions

        found = self.installed()
        if found.version is None:
            yield Finding(self.name, "problem" if wanted else "ok",
                          "is not installed" + ("" if wanted else " (needed for large targets only)"),
                          _REMEDY if wanted else None)  # fmt: skip
        elif found.trouble:
            yield Finding(self.name, "problem" if wanted else "warning", found.trouble, found.hint)
        else:
            number = versions.parse(found.version)
            text = ".".join(map(str, number))
            if lacking := versions.remarks(number):
                yield Finding(self.name, "warning", f"{text} {'; '.join(lacking)}", versions.INSTALL)
            elif number < versions.DEPENDABLE:
                yield Finding(self.name, "warning", f"{text} works; newer is dependable", versions.INSTALL)
            else:
                yield Finding(self.name, "ok", text)
        if config and config.extract.engine == self.name and config.vllm.staging_dir is None:
            yield from _staging(config.vllm.staging_bytes)

    def gpus(self, config: "RunConfig") -> int:
        return config.vllm.tensor_parallel_size

    def memory_share(self, config: "RunConfig") -> float:
        return config.vllm.gpu_memory_utilization

    def memory(self, config: "RunConfig", target: TargetSize) -> tuple[int, str]:
        ranks = config.vllm.tensor_parallel_size
        # Every rank holds the states whole, and a latent cache too.
        states = target.spec.bytes_per_token
        split = 1 if target.latent_cache else ranks
        per_token = states + target.kv_bytes_per_token // split
        one = config.data.max_length * per_token
        return (
            target.weight_bytes // ranks + one,
            f"1/{ranks} of the weights, and {per_token / 1000:,.0f} KB a token ({states / 1000:,.0f} KB "
            f"states) for one sample of {config.data.max_length:,} tokens at least",
        )

    def answers_as_it_captures(self, config: "RunConfig") -> bool:
        from eyas.engines.vllm import versions

        # With hooks, which need eager mode: on a GPU answers would be slower. The facility computes two rows
        # for each token of an answer, and a further argument may be prefix caching, whose rows hooks miss.
        settings = config.vllm
        by_hooks = settings.capture != "native" and not settings.engine_args
        return by_hooks and versions.is_installed() and versions.is_cpu_build()

    def baseline(self, name: str, target: Path, spec: "TargetSpec") -> "Baseline":
        from eyas.engines.vllm.baselines import parse_baseline

        found = parse_baseline(name)
        found.check(target, spec)
        return found

    def in_actor(self, config: "RunConfig") -> "RunConfig":
        vllm = config.vllm
        if any(word.startswith(_BACKEND) for word in vllm.engine_args):
            return config
        # Within an actor vLLM would ask Ray for further ones, of which no GPU is left.
        own = vllm.model_copy(update={"engine_args": (*vllm.engine_args, f"{_BACKEND}=mp")})
        return config.model_copy(update={"vllm": own})

    def capture_server(
        self, config: "RunConfig", folder: Path, spec: "TargetSpec", host: str, port: int, here: bool
    ) -> CaptureServer:
        from eyas.engines.vllm import engine_args, versions
        from eyas.engines.vllm.state_transfer import staging_base

        settings = config.vllm
        versions.check_parallel(spec, settings.tensor_parallel_size)
        # Elsewhere extract asks the server for its version.
        if versions.is_installed() or here:
            version = versions.installed_version()
            versions.choose_way("native", version, spec, settings.tensor_parallel_size)
        plan = engine_args.Plan(
            folder,
            spec,
            settings,
            min(config.data.max_length, spec.max_position_embeddings) + 1,
            config.extract.batch_tokens,
            config.extract.batch_size,
            config.target.trust_remote_code,
            "native",
        )
        base = settings.staging_dir or staging_base(settings.staging_bytes)
        # One folder a target, so that two servers do not meet.
        staging = base.absolute() / f"eyas-serve-{spec.weights_fingerprint}"
        on_cpu = versions.is_cpu_build()
        words = engine_args.serve_command(plan, staging, on_cpu=on_cpu, host=host, port=port)
        variables = engine_args.environment(plan)
        return CaptureServer(words, variables, engine_args.as_shell(words, variables))

    def check_kind(self, kind: str) -> None:
        from eyas.engines.vllm import versions

        versions.check_kind(self.draft_file(kind))

    def check_server(self, server: DraftServer, spec: "TargetSpec") -> None:
        from eyas.engines.vllm import versions

        versions.check_draft_support(spec, self.draft_file(server.kind))
        versions.check_parallel(spec, server.tp_size)

    def short_command(self, kind: str, target: str, num_draft_tokens: int, draft: Path) -> str:
        config = json.dumps(self.draft_file(kind).speculative_config("THIS_FOLDER", num_draft_tokens))
        return f"vllm serve {target} \\\n  --speculative-config '{config}'"

    def serve_command(self, server: DraftServer, on_cpu: bool) -> list[str]:
        draft = str(server.draft.resolve())
        kind = self.draft_file(server.kind)
        config = json.dumps(kind.speculative_config(draft, server.num_draft_tokens))
        # The CPU build's server does not start by the short name: its distribution is not called vllm.
        short = ["vllm", "serve", server.target]
        long = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", server.target]
        memory = () if on_cpu else ("--gpu-memory-utilization", str(server.gpu_memory_utilization))
        return [
            *(*(long if on_cpu else short), "--dtype", server.dtype, "--speculative-config", config),
            *(("--tensor-parallel-size", str(server.tp_size)) if server.tp_size > 1 else ()),
            *(("--trust-remote-code",) if server.trust_remote_code else ()),
            *(("--revision", server.revision) if server.revision else ()),
            # Else penalties and filters of the model's generation_config.json change the target's answers.
            *("--generation-config", "vllm"),
            *(*memory, "--host", server.host, "--port", str(server.port), *server.extra),
        ]


def _staging(needed: int) -> Iterator[Finding]:
    """Yield a warning where states would not fit into shared memory."""
    shm = Path("/dev/shm")
    room = shutil.disk_usage(shm).free if shm.is_dir() else 0
    if room < needed:
        yield Finding("staging", "warning", f"/dev/shm has {room / 1e9:.1f} GB free, less than "
                      "vllm.staging_bytes", "states go through a folder on disk instead; in a container "
                      "give --shm-size")  # fmt: skip


INFO = VllmInfo(
    "vllm",
    "vLLM",
    engine="eyas.engines.vllm.engine:VllmEngine",
    decoder="eyas.engines.vllm.decoder:VllmDecoder",
    captures=True,
    captures_remotely=True,
    generates=True,
    serves=True,
    takes_arrivals=True,
    section="vllm",
    gpus_setting="vllm.tensor_parallel_size",
    memory_setting="vllm.gpu_memory_utilization",
    speed_settings=(("vllm", "tensor_parallel_size"),),
)
