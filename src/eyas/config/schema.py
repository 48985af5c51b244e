"""Every setting of a run, with its default: the one place where defaults live."""

import importlib.util
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    SerializeAsAny,
    field_validator,
)

from eyas import registry


def _best_engine(name: str) -> str:
    """Return the engine that ``auto`` stands for on this machine; no engine is imported for it."""
    if name != "auto":
        return name
    on_gpu = Path("/proc/driver/nvidia/version").exists() and importlib.util.find_spec("vllm") is not None
    return registry.SERVING_ENGINE if on_gpu else registry.REFERENCE_ENGINE


Engine = Annotated[str, AfterValidator(_best_engine)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class TargetSettings(Section):
    """The model to be sped up."""

    model: str = Field(description="a local model folder, a hub id, or demo:smollm2-135m-instruct")
    revision: str | None = Field(None, description="hub revision")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="compute and storage type of the target's states; auto: as in its config.json"
    )
    aux_layer_ids: tuple[int, ...] | None = Field(
        None,
        description="layers to capture: id L is the stream after L layers; default: those that the draft's "
        "kind reads, such as [2, n//2, n-3]",
    )
    trust_remote_code: bool = Field(False, description="allow code from the model folder")
    fingerprint: Literal["sampled", "full"] = Field(
        "sampled", description="what identifies the weights: bytes of every tensor, or all bytes (slow)"
    )


class WeightedSource(Section):
    """A source of which only a share is used."""

    path: str = Field(description="as in data.sources")
    weight: float = Field(1.0, gt=0, le=1, description="share of its rows that is used, chosen by hash")


class DataSettings(Section):
    """Conversations and how they become tokens."""

    sources: tuple[str | WeightedSource, ...] = Field(
        description="files, folders, globs, - for standard input, hf:owner/name:split; or {path, weight}"
    )
    max_length: PositiveInt = Field(2048, description="tokens of a sample at most; longer ones are cut")
    validation_fraction: float = Field(
        0.05, ge=0, lt=1, description="share of conversations kept for validation"
    )
    max_drop_share: float = Field(0.1, ge=0, le=1, description="stop when more rows than this are dropped")
    skip_broken_lines: bool = Field(False, description="count lines that are not JSON as drops, and go on")
    role_map: dict[str, str] = Field({}, description="further role names, e.g. {my-model: assistant}")
    ignore_keys: tuple[str, ...] = Field(
        (),
        description="keys of rows and messages that are not read, e.g. a weight that is no training weight",
    )
    template_kwargs: dict[str, Any] = Field(
        {}, description="passed to the chat template, as the server will: e.g. {enable_thinking: false}"
    )

    @field_validator("sources", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str | dict) else value

    @property
    def weighted_sources(self) -> list[tuple[str, float]]:
        return [(s, 1.0) if isinstance(s, str) else (s.path, s.weight) for s in self.sources]


class RegenerateSettings(Section):
    """The target answers the prompts itself, so that the draft learns what it will have to predict."""

    enabled: bool = Field(True, description="false: train on the answers in the data")
    engine: Engine = Field(
        "auto", description="engine that generates; auto: vllm where it is installed and a GPU is there"
    )
    endpoint: str | None = Field(
        None, description="OpenAI-compatible server that generates instead, e.g. http://127.0.0.1:8000/v1"
    )
    concurrency: PositiveInt = Field(1024, description="requests in flight at an endpoint")
    timeout_s: float = Field(1800, gt=0, description="longest wait for one answer of an endpoint")
    max_failures: NonNegativeInt = Field(0, description="answers that may fail before the stage stops")
    extra_body: dict[str, Any] = Field({}, description="further fields of each request, e.g. {top_p: 0.95}")
    max_other_share: float = Field(
        0.05,
        ge=0,
        le=1,
        description="share of an endpoint's first greedy tokens that may not be the target's",
    )
    max_new_tokens: PositiveInt = Field(512, description="length limit of one answer")
    batch_size: PositiveInt = Field(32, description="conversations in flight in an engine of our own")
    temperature: float = Field(0.0, ge=0, description="0: greedy")


class FleetSettings(Section):
    """Several engines that share the samples, in actors of Ray."""

    replicas: PositiveInt = Field(description="engines at work, each with a copy of the target")
    gpus_per_replica: NonNegativeInt = Field(1, description="GPUs of one engine; 0: it runs on a CPU")


class ExtractSettings(Section):
    """Capture of the target's hidden states."""

    engine: Engine = Field("auto", description="engine that computes the states; auto: as regenerate.engine")
    prepared_data: Path | None = Field(
        None, description="samples from elsewhere: another run's prepared folder, or a JSONL of input_ids"
    )
    endpoint: str | None = Field(
        None, description="vLLM server that captures instead, started as eyas serve-capture --print shows"
    )
    batch_size: PositiveInt = Field(64, description="samples computed together at most")
    batch_tokens: PositiveInt = Field(4096, description="tokens of a batch, padding included")
    shard_bytes: PositiveInt = Field(512 << 20, description="size of one shard")
    states_dir: str | None = Field(
        None, description="folder or fsspec URL of the states, e.g. s3://bucket/run; default: in run_dir"
    )
    states_dtype: Literal["auto", "float8_e4m3fn"] = Field(
        "auto", description="how states are stored: as computed, or in 8 bits, a scale a token and layer"
    )
    max_failures: NonNegativeInt = Field(0, description="samples that may fail before the stage stops")
    fleet: FleetSettings | None = Field(
        None, description="engines of a Ray cluster, e.g. {replicas: 4, gpus_per_replica: 8}"
    )


class RaySettings(Section):
    """The Ray cluster that a fleet works on."""

    address: str | None = Field(
        None, description="head node to join, e.g. 10.0.0.1:6379, or auto; default: this machine alone"
    )


class VllmSettings(Section):
    """The engine vllm, wherever a stage names it."""

    tensor_parallel_size: PositiveInt = Field(1, description="GPUs that hold one copy of the target")
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="share of a GPU's memory it may use")
    capture: Literal["auto", "native", "worker"] = Field(
        "auto", description="way of the states: vLLM's own facility, or hooks in its workers (eager)"
    )
    staging_dir: Path | None = Field(
        None, description="folder through which states leave the workers; default: /dev/shm if it has room"
    )
    staging_bytes: PositiveInt = Field(4 << 30, description="states in flight at most")
    kv_cache_bytes: PositiveInt | None = Field(
        None, description="memory of its key/value cache; default: by gpu_memory_utilization"
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        "ERROR", description="its log and its workers', on stderr"
    )
    engine_args: tuple[str, ...] = Field(
        (), description="further arguments of vLLM's own, such as attention_backend=FLASH_ATTN"
    )


class DraftSettings(Section):
    """The draft model. Each architecture has further settings, which lie in its folder."""

    architecture: str = Field("eagle3", description="kind of draft; it decides which settings follow")
    vocab_size: PositiveInt | None = Field(32000, description="draft vocabulary W; null: all of the target's")
    aux_layer_ids: tuple[int, ...] | None = Field(
        None,
        description="captured layers that the draft reads, as in target.aux_layer_ids; default: the kind's "
        "own where they are captured, else all that are",
    )
    init_from: str | None = Field(
        None, description="start from this draft: a folder or hub id, native or speculators format"
    )


def draft_settings_of(architecture: Any) -> type[DraftSettings]:
    """Return the settings of a kind of draft. Raises: UserError for a kind that nobody registered."""
    if not isinstance(architecture, str):
        return DraftSettings  # which refuses it
    settings: type[DraftSettings] = registry.drafter_file(architecture, "settings").Settings
    return settings


def default_draft() -> DraftSettings:
    return draft_settings_of(DraftSettings().architecture)()


class TrainSettings(Section):
    """Optimisation of the draft."""

    source: Literal["store", "stream"] = Field(
        "store", description="stream: capture states while training, a window at a time, and never store them"
    )
    stream_bytes: PositiveInt = Field(
        4 << 30,
        description="memory for the states between engines and trainers of train.source=stream, in all",
    )
    keep_states: bool = Field(
        False, description="stream: also write what is captured, for later epochs and later runs"
    )
    num_epochs: PositiveInt = Field(3, description="passes over the data")
    batch_tokens: PositiveInt = Field(8192, description="tokens packed into one batch")
    recompute: bool = Field(
        False,
        description="compute the MLP twice instead of keeping it: for very long documents",
    )
    batches_per_step: PositiveInt = Field(1, description="batches whose gradients make one optimizer step")
    optimizer: Literal["adamw", "muon"] = Field(
        "muon", description="muon: the layer's matrices by Muon, head and norms by AdamW; adamw: all by AdamW"
    )
    train_head: bool = Field(True, description="false: the head stays the target's rows")
    learning_rate: Annotated[float, Field(gt=0)] | Literal["auto"] = Field(
        "auto",
        description="peak learning rate; auto: 3e-3 (Muon) or 2e-3 (AdamW) at width 576, less by the root of "
        "the draft's width, and half of that with draft.init_from",
    )
    warmup_share: float = Field(0.05, ge=0, lt=1, description="share of the steps spent warming up")
    weight_decay: float = Field(0.0, ge=0, description="weight decay, matrices only")
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW moments")
    max_grad_norm: float = Field(0.5, gt=0, description="gradient norm is clipped to this")
    ema_decay: float | None = Field(
        None, gt=0, lt=1, description="keep a running average of the weights, e.g. 0.99; null: the last ones"
    )
    compute_dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="matrix multiplications; auto: bfloat16 on CUDA, else float32"
    )
    validate_draft_tokens: PositiveInt = Field(
        3,
        description="draft tokens per round at which validation replays acceptance, to rank checkpoints",
    )
    validate_every: PositiveInt = Field(100, description="steps between validations")
    save_every: PositiveInt = Field(100, description="steps between checkpoints")
    device: str = Field(
        "auto", description="device of training: cpu, cuda, or auto; engines use a GPU where there is one"
    )
    num_gpus: PositiveInt = Field(
        1, description="GPUs of this machine that share each step's micro-batches; under torchrun, its own"
    )
    shard: bool = Field(
        False,
        description="each GPU keeps a slice of fp32 weights, moments and gradient sums: for large drafts",
    )
    trackers: tuple[str, ...] = Field(
        (), description="where curves also go: tensorboard, wandb, mlflow, trackio"
    )


# What says where training runs or is shown, and nothing about what comes out.
MACHINE_SETTINGS = {"device", "num_gpus", "shard", "trackers", "stream_bytes", "keep_states"}


class ExportSettings(Section):
    """The folder that inference engines load."""

    format: str = Field(
        "native", description="native: what vLLM and SGLang load; or speculators, for vllm serve FOLDER"
    )
    include_embedding: bool = Field(False, description="write the target's embedding too; engines share it")


class EvaluateSettings(Section):
    """Speculative decoding with the exported draft."""

    num_draft_tokens: PositiveInt = Field(3, description="K, draft tokens per target forward")
    num_prompts: PositiveInt = Field(
        32, description="held-out prompts decoded, and prompts of each benchmark"
    )
    max_new_tokens: int = Field(
        128, ge=2, description="tokens decoded for each prompt; the first needs no draft"
    )
    in_process: bool = Field(
        True, description="decode in this process; false for targets too large for transformers here"
    )
    engine: str = Field(
        "transformers",
        description="an engine that serves (vllm, sglang): measure the draft there too, and compare",
    )
    endpoint: str | None = Field(
        None, description="measure a server that runs with the draft, e.g. http://127.0.0.1:8000/v1"
    )
    benchmarks: tuple[str, ...] = Field(
        (),
        description="served besides held-out prompts: mt-bench, humaneval, gsm8k, long, files, "
        "hf:owner/name:split",
    )
    sweep_draft_tokens: tuple[PositiveInt, ...] = Field(
        (), description="further K that are served and compared, e.g. [1, 5]"
    )
    concurrency: tuple[PositiveInt, ...] = Field(
        (1, 2, 4, 8, 16, 32, 64), description="requests at a time that are served and compared"
    )
    temperatures: tuple[float, ...] = Field(
        (0.0,), description="sampling temperatures that are served; 0 always is"
    )
    timed_rounds: PositiveInt = Field(
        3, description="times that all prompts are served at each concurrency and rate; medians are reported"
    )
    request_rates: tuple[Annotated[float, Field(gt=0)], ...] = Field(
        (), description="requests a second that arrive whether or not earlier ones are answered, e.g. [4, 16]"
    )
    baselines: tuple[str, ...] = Field(
        (),
        description="what drafts without training, served for comparison: ngram, suffix, mtp (the target's "
        "own heads), draft_model:FOLDER",
    )


class RunConfig(Section):
    """One run: what a run file holds."""

    run_dir: Path = Field(description="folder of this run")
    base_run: Path | None = Field(
        None,
        description="another run's folder: stages that would be made from the same inputs are taken from it, "
        "as links, without copying",
    )
    seed: int = Field(0, description="split, initialisation and shuffling")
    target: TargetSettings
    data: DataSettings
    regenerate: RegenerateSettings = RegenerateSettings()
    extract: ExtractSettings = ExtractSettings()
    vllm: VllmSettings = VllmSettings()
    ray: RaySettings = RaySettings()
    draft: SerializeAsAny[DraftSettings] = Field(default_factory=default_draft)
    train: TrainSettings = TrainSettings()
    export: ExportSettings = ExportSettings()
    evaluate: EvaluateSettings = EvaluateSettings()

    @field_validator("draft", mode="before")
    @classmethod
    def _settings_of_its_kind(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        kind = value.get("architecture", DraftSettings().architecture)
        return draft_settings_of(kind).model_validate(value)
