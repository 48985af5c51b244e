"""What a run asks of its engines, compared with their facts before anything starts."""

import socket
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import urlsplit

from eyas.config.schema import EvaluateSettings, RunConfig
from eyas.engines.info import EngineInfo, engine_info, engines_that
from eyas.errors import UserError

# What only an engine that serves reads; the decoder of this process is greedy, one request at a time.
_SERVED_ONLY = (
    "benchmarks",
    "sweep_draft_tokens",
    "concurrency",
    "temperatures",
    "timed_rounds",
    "request_rates",
    "baselines",
)
# What a running server, with one draft and answers that do not stream, cannot tell.
_ENGINE_ONLY = ("request_rates", "baselines")


def check_abilities(config: RunConfig) -> None:
    """Raises: UserError for an engine that is named for what it cannot do, or a name that none has."""
    regenerate, extract, evaluate = config.regenerate, config.extract, config.evaluate
    abilities: tuple[tuple[str, str, Callable[[EngineInfo], bool], str], ...] = (
        ("regenerate.engine", regenerate.engine, lambda info: info.generates, "generates no answers"),
        ("extract.engine", extract.engine, lambda info: info.captures, "captures no states"),
        ("evaluate.engine", evaluate.engine, evaluates, "does not decode with a draft here"),
    )
    for key, name, able, does in abilities:
        if not able(engine_info(name)):
            names = " or ".join(info.name for info in engines_that(able))
            raise UserError(f"{key}={name}: {engine_info(name).title} {does}", hint=f"set {key}={names}")
    check_endpoint(config)


def evaluates(info: EngineInfo) -> bool:
    """Whether ``evaluate.engine`` may name it: it decodes with a draft, or opens sessions for eyas to."""
    return info.decoder is not None or info.opens_sessions


def check_endpoint(config: RunConfig) -> None:
    """Raises: UserError for ``extract.endpoint`` with an engine whose servers do not capture."""
    extract = config.extract
    if extract.endpoint is not None and not engine_info(extract.engine).captures_remotely:
        able = engines_that(lambda info: info.captures_remotely)
        servers, names = " or ".join(f"a {i.title}" for i in able), " or ".join(i.name for i in able)
        raise UserError(
            f"extract.endpoint is {servers} server's, but extract.engine is {extract.engine!r}",
            hint=f"set extract.engine={names}, or leave the endpoint out",
        )


def check_evaluation(settings: EvaluateSettings) -> None:
    """Raises: UserError for settings that nothing would read without an engine that serves."""
    if settings.endpoint is not None:
        if asked := [name for name in _ENGINE_ONLY if getattr(settings, name)]:
            raise UserError(
                f"evaluate.{asked[0]} is measured in an engine that eyas starts, not at evaluate.endpoint",
                hint="set evaluate.engine=vllm instead of the endpoint",
            )
        return
    info = engine_info(settings.engine)
    if is_served(settings):
        if settings.request_rates and not info.takes_arrivals:
            able = " or ".join(other.name for other in engines_that(lambda other: other.takes_arrivals))
            raise UserError(
                f"evaluate.request_rates is not measured in {info.title}",
                hint=f"set evaluate.engine={able}, or leave the rates out",
            )
        return
    able = " or ".join(info.name for info in engines_that(lambda info: info.decoder))
    if not settings.in_process:
        raise UserError(
            "evaluate.in_process is false and no engine is named", hint=f"set evaluate.engine={able}"
        )
    fields = EvaluateSettings.model_fields
    if unread := [name for name in _SERVED_ONLY if getattr(settings, name) != fields[name].default]:
        raise UserError(
            f"evaluate.{unread[0]} is measured in an engine that serves, and none is named",
            hint=f"set evaluate.engine={able}, or evaluate.endpoint=URL",
        )


def is_served(settings: EvaluateSettings) -> bool:
    """Whether the draft is also measured in an engine that serves, or at a server."""
    return engine_info(settings.engine).decoder is not None or settings.endpoint is not None


def engine_of(config: RunConfig, stage: str) -> EngineInfo | None:
    """Return the engine that a stage starts on this machine, if it starts one there."""
    if stage == "regenerate" and config.regenerate.enabled and config.regenerate.endpoint is None:
        return engine_info(config.regenerate.engine)
    if stage == "extract" and config.extract.endpoint is None and config.extract.fleet is None:
        return engine_info(config.extract.engine)
    if stage == "evaluate" and config.evaluate.endpoint is None:
        return engine_info(config.evaluate.engine)
    return None


def engines_of(config: RunConfig) -> list[EngineInfo]:
    """Return the engines that some stage of a run starts on this machine, each once."""
    used = [engine_of(config, stage) for stage in ("regenerate", "extract", "evaluate")]
    return list(dict.fromkeys(info for info in used if info is not None))


def check_installed(config: RunConfig, stages: Iterable[str]) -> None:
    """Raises: UserError where an engine that one of ``stages`` starts cannot be used here."""
    for info in filter(None, (engine_of(config, stage) for stage in stages)):
        found = info.installed()
        if found.trouble:
            raise UserError(found.trouble, found.hint)


def check_endpoints(config: RunConfig, stages: Iterable[str]) -> None:
    """Raises: UserError where a server that one of ``stages`` asks does not answer now.

    A server that runs with the draft can only be there when nothing but the evaluation is left to do.
    """
    stages = list(stages)
    asked = {"regenerate": config.regenerate.endpoint if config.regenerate.enabled else None}
    if stages == ["evaluate"]:
        asked["evaluate"] = config.evaluate.endpoint
    for stage, url in asked.items():
        if stage in stages and url is not None:
            parts = urlsplit(url)
            port = parts.port or (443 if parts.scheme == "https" else 80)
            try:
                socket.create_connection((parts.hostname or "", port), timeout=10).close()
            except OSError as error:
                raise UserError(
                    f"{stage}.endpoint={url} does not answer: {error.strerror or error}",
                    hint="start the server first, or correct the address",
                ) from None


def check_draft_tokens(config: RunConfig, most: int | None) -> None:
    """Raises: UserError for more draft tokens than one round of the draft gives."""
    if most is None:
        return
    asked = {
        "evaluate.num_draft_tokens": (config.evaluate.num_draft_tokens,),
        "evaluate.sweep_draft_tokens": config.evaluate.sweep_draft_tokens,
        "train.validate_draft_tokens": (config.train.validate_draft_tokens,),
    }
    for key, numbers in asked.items():
        if max(numbers, default=0) > most:
            raise UserError(
                f"{key} asks for {max(numbers)} draft tokens, a {config.draft.architecture} draft with these "
                f"settings makes {most} a round",
                hint=f"ask for {most} at most",
            )


def check_draft_heads(shape: Any, num_ranks: int, setting: str) -> None:
    """Raises: UserError where the draft's heads do not divide among the ranks of the engine that serves it.

    ``setting`` is what says how many ranks there are.
    """
    heads, kv_heads = shape.num_attention_heads, shape.num_key_value_heads
    if heads % num_ranks or (kv_heads % num_ranks and num_ranks % kv_heads):
        raise UserError(
            f"the draft's {heads} attention heads and {kv_heads} key/value heads do not divide among "
            f"{setting}={num_ranks} ranks",
            hint=f"train it with draft.num_attention_heads a multiple of {num_ranks}, or serve on fewer GPUs",
        )


def check_fleet(config: RunConfig) -> None:
    """Raises: UserError for engines of another number of GPUs than the fleet's replicas have."""
    info, fleet = engine_info(config.extract.engine), config.extract.fleet
    gpus = info.gpus(config)
    if fleet and gpus and fleet.gpus_per_replica not in (0, gpus):
        raise UserError(
            f"extract.fleet.gpus_per_replica={fleet.gpus_per_replica}, "
            f"but one engine uses {info.gpus_setting}={gpus} GPUs",
            hint=f"set extract.fleet.gpus_per_replica={gpus}",
        )


def check_engine_a_rank(config: RunConfig, num_ranks: int) -> None:
    """Raises: UserError for an engine of several GPUs next to each of several ranks, which have one."""
    extract, info = config.extract, engine_info(config.extract.engine)
    gpus = info.gpus(config)
    if num_ranks > 1 and gpus > 1 and not (extract.fleet or extract.endpoint):
        raise UserError(
            f"each of {num_ranks} ranks captures on its own GPU, and {info.gpus_setting}={gpus}",
            hint="let engines of their own capture: extract.fleet={replicas: N, gpus_per_replica: "
            f"{gpus}}}, or a server (extract.endpoint)",
        )


def check_gpu_share(config: RunConfig, training_bytes: float, gpu_bytes: int) -> None:
    """Raises: UserError for an engine that reserves so much of a GPU that training lacks room."""
    info = engine_info(config.extract.engine)
    share = info.memory_share(config)
    room = gpu_bytes * (1 - share)
    if training_bytes > room:
        fitting = int(100 * (1 - training_bytes / gpu_bytes)) / 100
        raise UserError(
            f"training needs about {training_bytes / 2**30:.1f} GiB next to {info.title}, whose share of "
            f"{share} leaves {room / 2**30:.1f} GiB of the GPU",
            hint=f"set {info.memory_setting}={fitting}"
            if fitting > 0
            else "lower train.batch_tokens, or store the states with train.source=store",
        )


def shares_start(config: RunConfig, stage: str) -> bool:
    """Whether a stage takes the one engine that does regenerate and extract when ``eyas run`` does both."""
    regenerate, extract = config.regenerate, config.extract
    from_elsewhere = (regenerate.endpoint, extract.endpoint, extract.prepared_data, extract.fleet)
    if stage not in ("regenerate", "extract") or any(other is not None for other in from_elsewhere):
        return False
    same = regenerate.enabled and regenerate.engine == extract.engine
    return same and engine_info(extract.engine).answers_as_it_captures(config)
