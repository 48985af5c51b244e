"""What the rest of eyas may ask about an engine without starting it; each engine's folder answers.

``eyas.registry.ENGINES`` names each engine's ``INFO``, in ``info.py`` of its folder. An ``info.py`` imports
neither torch nor the engine before a method needs them.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from eyas import registry
from eyas.errors import UserError
from eyas.findings import Finding
from eyas.layer_ids import ReadLayers

if TYPE_CHECKING:
    from eyas.config.schema import RunConfig
    from eyas.types import TargetSpec

_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Installed:
    """The engine's package on this machine. ``version`` is None where it is not installed."""

    version: str | None
    trouble: str | None = None  # why it cannot be used here, in one sentence
    hint: str | None = None


@dataclass(frozen=True)
class DraftServer:
    """A server with a draft, as ``eyas serve`` is asked for it. ``extra`` words go to the engine unchanged.

    ``kind`` is the draft's; ``revision`` is the target's on the hub, None for a folder.
    """

    draft: Path
    kind: str
    target: str
    num_draft_tokens: int
    dtype: str
    host: str
    port: int
    tp_size: int
    gpu_memory_utilization: float
    trust_remote_code: bool = False
    revision: str | None = None
    extra: tuple[str, ...] = ()


@dataclass(frozen=True)
class CaptureServer:
    """The words and environment variables that start a server which captures, as a shell takes them too."""

    words: list[str]
    variables: Mapping[str, str]
    text: str


class TargetSize(Protocol):
    """What a plan knows of a target; ``latent_cache``: every rank holds the cache whole."""

    @property
    def spec(self) -> "TargetSpec": ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def kv_bytes_per_token(self) -> int: ...
    @property
    def latent_cache(self) -> bool: ...


@dataclass(frozen=True)
class EngineInfo:
    """Facts of one engine. The defaults are those of an engine that computes in this process.

    ``engine`` and ``decoder`` are ``module:Class``. A subclass in the engine's folder overrides the methods
    whose answer differs.
    """

    name: str
    title: str  # as people write it
    engine: str | None = None  # captures or generates; has the methods of engines.base.Engine
    decoder: str | None = None  # decodes with an exported draft, and counts what is accepted
    captures: bool = False
    captures_remotely: bool = False  # also from a server (extract.endpoint)
    generates: bool = False
    opens_sessions: bool = False  # decodes step by step in this process (engines.base.TargetSession)
    serves: bool = False  # eyas serve starts its server, or prints the command
    takes_arrivals: bool = False  # its decoder is sent requests at given times (evaluate.request_rates)
    section: str | None = None  # its section of the run file; such an engine reserves memory ahead
    gpus_setting: str | None = None  # the setting that ``gpus`` returns
    memory_setting: str | None = None  # the setting that ``memory_share`` returns
    speed_settings: tuple[tuple[str, str], ...] = ()  # section and key of what its speed depends on

    def installed(self) -> Installed:
        """Look for the engine's package, without importing it where that is possible."""
        import eyas

        return Installed(eyas.__version__)

    def findings(self, config: "RunConfig | None", wanted: bool) -> Iterator[Finding]:
        """Yield what ``eyas doctor`` says of it; ``wanted``: the run of ``config`` uses it."""
        found = self.installed()
        if found.trouble:
            yield Finding(self.name, "problem" if wanted else "ok", found.trouble, found.hint)

    def gpus(self, config: "RunConfig") -> int:
        """Return the GPUs of one engine; 0 where it uses the device of this process."""
        return 0

    def memory_share(self, config: "RunConfig") -> float:
        """Return the share of a GPU's memory that it reserves; 0 where it takes what it needs."""
        return 0.0

    def memory(self, config: "RunConfig", target: TargetSize) -> tuple[int, str]:
        """Return bytes that each GPU (or the machine, without one) needs, and what is in them."""
        spec = target.spec
        # What a layer holds for a batch: the captured states, and an MLP's intermediates.
        batch = config.extract.batch_tokens * _ITEMSIZE[spec.dtype]
        work = batch * ((spec.num_aux_layers + 3) * spec.hidden_size + 3 * spec.intermediate_size)
        return target.weight_bytes + work, "weights and one batch"

    def answers_as_it_captures(self, config: "RunConfig") -> bool:
        """Whether one engine (``answers=True``) may answer and capture, no slower than two."""
        return False

    def start(
        self, config: "RunConfig", folder: Path, spec: "TargetSpec", device: str, **settings: Any
    ) -> Any:
        """Return an ``Engine`` of the target in ``folder``."""
        assert self.engine is not None
        if self.section is not None:
            own = getattr(config, self.section)
            settings |= {"settings": own, "max_length": config.data.max_length}
        trust = config.target.trust_remote_code
        return registry.load(self.engine)(folder, spec, device=device, trust_remote_code=trust, **settings)

    def start_decoder(self, config: "RunConfig", folder: Path, spec: "TargetSpec", **settings: Any) -> Any:
        """Return a ``Decoder`` of the target in ``folder``.

        ``settings`` hold ``draft`` (folder or None), ``num_draft_tokens``, ``max_length`` and
        ``max_concurrency``; the class also gets ``kind``: what ``settings`` name (a baseline), else the file
        of the draft's kind for this engine.
        """
        assert self.decoder is not None
        if self.section is not None:
            settings["settings"] = getattr(config, self.section)
        settings.setdefault("kind", self.draft_file(config.draft.architecture))
        trust = config.target.trust_remote_code
        return registry.load(self.decoder)(folder, spec, trust_remote_code=trust, **settings)

    def baseline(self, name: str, target: Path, spec: "TargetSpec") -> Any:
        """Return what stands for a draft's kind where ``name`` of evaluate.baselines drafts instead.

        Raises: UserError for what this engine cannot draft with here.
        """
        raise UserError(f"{self.title} has no baselines", hint="leave evaluate.baselines out")

    def in_actor(self, config: "RunConfig") -> "RunConfig":
        """Return the settings with which it starts within an actor of Ray."""
        return config

    def capture_server(
        self, config: "RunConfig", folder: Path, spec: "TargetSpec", host: str, port: int, here: bool
    ) -> CaptureServer:
        """Return what starts a server for ``extract.endpoint``; ``here``: on this machine.

        Raises: UserError for what it cannot capture.
        """
        raise NotImplementedError

    def draft_file(self, kind: str) -> Any:
        """Return the file of a draft kind's folder that says how this engine is told to serve such a draft.

        Raises: UserError for a kind without that file.
        """
        if not registry.has_drafter_file(kind, self.name):
            raise UserError(
                f"{self.title} serves no drafts of kind {kind}",
                hint="leave evaluate.engine out; eyas evaluate decodes in this process",
            )
        return registry.drafter_file(kind, self.name)

    def draft_trouble(self, kind: str, shape: Any, layers: ReadLayers | None) -> str | None:
        """Say why it would not compute a draft of this kind and shape as it was trained, or None.

        ``layers`` None: the target is not known.
        """
        if not registry.has_drafter_file(kind, self.name):
            return f"{self.title} serves no drafts of kind {kind}"
        trouble: str | None = getattr(self.draft_file(kind), "trouble", lambda shape, layers: None)(
            shape, layers
        )
        return trouble

    def check_draft(self, kind: str, shape: Any, layers: ReadLayers | None) -> None:
        """Raises: UserError for a draft that it would serve, but not as it was trained."""
        if self.serves and (trouble := self.draft_trouble(kind, shape, layers)):
            others = " or ".join(other.name for other in engines_that(lambda o: o.serves and o is not self))
            raise UserError(trouble, hint=f"take another engine: {others}")

    def short_command(self, kind: str, target: str, num_draft_tokens: int, draft: Path) -> str:
        """Return a command that a person serves the draft of a folder with, which it calls THIS_FOLDER."""
        raise NotImplementedError

    def least_version(self, kind: str, layers: ReadLayers) -> str | None:
        """Return the first version that serves such a draft as it was trained; None: a check here says it."""
        return None

    def check_kind(self, kind: str) -> None:
        """Raises: UserError when the engine here serves no drafts of a kind."""
        self.draft_file(kind)

    def check_version(self, kind: str, layers: ReadLayers | None) -> None:
        """Raises: UserError where the version that is installed would serve such a draft wrongly."""

    def check_server(self, server: DraftServer, spec: "TargetSpec") -> None:
        """Raises: UserError when the engine here cannot serve the target with this draft."""

    def serve_command(self, server: DraftServer, on_cpu: bool) -> list[str]:
        """Return the words that start the server."""
        raise NotImplementedError


def engine_info(name: str) -> EngineInfo:
    """Return the facts of the engine registered under ``name``.

    Raises: UserError naming the closest known name.
    """
    info: EngineInfo = registry.resolve(registry.ENGINES, name, "engine")
    return info


def draft_troubles(kind: str, shape: Any, layers: ReadLayers) -> dict[str, str]:
    """Return why engines would not compute a draft as it was trained, by their titles."""
    serving = engines_that(lambda info: info.serves)
    found = {info.title: info.draft_trouble(kind, shape, layers) for info in serving}
    return {title: trouble for title, trouble in found.items() if trouble}


def check_layers(kind: str, layers: ReadLayers) -> None:
    """Raises: UserError for layers that some engine cannot capture for a draft: one folder serves all."""
    for info in engines_that(lambda info: info.serves):
        if registry.has_drafter_file(kind, info.name):
            getattr(info.draft_file(kind), "check_layers", lambda layers: None)(layers)


def engines_that(can: Callable[[EngineInfo], Any]) -> list[EngineInfo]:
    """Return the registered engines of which ``can`` holds, by name."""
    return [info for info in map(engine_info, sorted(registry.ENGINES)) if can(info)]
