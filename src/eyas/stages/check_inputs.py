"""What the stages that are to be done need: data, folders, devices, trackers, positions of the target."""

import importlib.util
from collections.abc import Sequence

from torch.distributed import is_torchelastic_launched

from eyas.data.sources import HUB_PREFIX, source_files
from eyas.errors import UserError
from eyas.stages.run_context import RunContext
from eyas.store.storage import folder_of
from eyas.train.ranks import check_device, check_gpus
from eyas.train.step_plan import check_ranks


def check_inputs(context: RunContext, to_do: Sequence[str]) -> None:
    """Raises: UserError where the data, another run's folder or the place of the states cannot be used."""
    config = context.config
    if config.base_run is not None and not (config.base_run / "run.yaml").is_file():
        raise UserError(
            f"base_run={config.base_run} is not a run folder", hint="name one that holds a run.yaml"
        )
    if (samples := config.extract.prepared_data) is not None:
        if "extract" in to_do and not samples.exists():
            raise UserError(
                f"there is no {samples}", hint="set extract.prepared_data to a folder or a JSONL file"
            )
        if config.regenerate.enabled:
            raise UserError(
                "extract.prepared_data gives the samples, but regenerate.enabled is true",
                hint="set regenerate.enabled=false",
            )
    elif "prepare" in to_do:
        for source, _ in config.data.weighted_sources:
            if not source.startswith(HUB_PREFIX):
                source_files(source)
    if config.extract.states_dir is not None:
        folder_of(config.extract.states_dir)


def check_length(context: RunContext, to_do: Sequence[str]) -> None:
    """Raises: UserError for samples longer than the target takes."""
    longest, positions = context.config.data.max_length, context.spec.max_position_embeddings
    if longest > positions and not {"prepare", "regenerate", "extract"}.isdisjoint(to_do):
        raise UserError(
            f"data.max_length={longest} is more than the target's {positions} positions",
            hint=f"set data.max_length={positions} or less",
        )


def check_training(context: RunContext, to_do: Sequence[str]) -> None:
    """Raises: UserError for devices or trackers that are not here."""
    train = context.config.train
    if "train" not in to_do:
        return
    for name in train.trackers:
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"train.trackers names {name}, which is not installed", hint="pip install 'eyas[trackers]'"
            )
    check_device(train.device)
    if train.num_gpus > 1 and not is_torchelastic_launched():
        check_ranks(train, train.num_gpus)
        if context.train_device == "cuda":
            check_gpus(train.num_gpus)
