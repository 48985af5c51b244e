"""From the name a user gives to a model folder on this machine."""

from pathlib import Path
from typing import Any

from eyas.errors import UserError
from eyas.files import read_json
from eyas.targets.demo import DEMO_PREFIX, demo_model_folder
from eyas.targets.files import is_url, unreachable
from eyas.targets.remote import describe_hub, describe_url, unfetched
from eyas.targets.weights import Weights


def locate(model: str, revision: str | None = None) -> Path:
    """Return a folder with the whole model, for an engine: local, a hub id, or ``demo:NAME``.

    Raises: UserError when there is no such folder and no such hub model.
    """
    if is_url(model):
        raise UserError(
            f"an engine needs the whole model on this machine, and target.model is {model}",
            hint="copy it here and set target.model to the folder; prepare, train and export read it there",
        )
    return _local(model) or _download(model, revision)


def locate_description(model: str, revision: str | None = None) -> Path:
    """Return a folder that describes the model and tells where its weights lie; none is downloaded.

    For a hub model that is on this machine as a whole already, that is its own folder.
    Raises: UserError as ``locate`` does.
    """
    if is_url(model):
        return describe_url(model)
    return _local(model) or _downloaded(model, revision) or describe_hub(model, revision)


def _local(model: str) -> Path | None:
    """Return the folder of what is no hub id.

    Raises: UserError when it is not there.
    """
    if model.startswith(DEMO_PREFIX):
        return demo_model_folder(model.removeprefix(DEMO_PREFIX))
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(
                f"{folder} has no config.json, so it is not a model folder",
                hint="set target.model to a folder in Hugging Face format",
            )
        return folder
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise UserError(
            f"there is no model folder {model}",
            hint="set target.model to a local folder, a hub id owner/name, or demo:smollm2-135m-instruct",
        )
    return None


def _downloaded(model: str, revision: str | None) -> Path | None:
    """Return the folder of a hub model that was downloaded as a whole before."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(model, revision=revision, local_files_only=True))
        Weights(folder).check_complete()
    except (LocalEntryNotFoundError, UserError, OSError, ValueError):
        return None
    return folder


def is_local(model: str) -> bool:
    """Whether ``locate`` gives a folder without the network."""
    if model.startswith(DEMO_PREFIX) or Path(model).expanduser().is_dir():
        return True
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(model, "config.json"), str)


def locate_config(model: str) -> dict[str, Any]:
    """Return a model's config.json; of a hub model that is not here yet, only that file is fetched.

    Raises: UserError.
    """
    if model.startswith(DEMO_PREFIX) or Path(model).expanduser().is_dir() or model.count("/") != 1:
        path = locate(model) / "config.json"
    else:
        from huggingface_hub import hf_hub_download

        try:
            path = Path(hf_hub_download(model, "config.json"))
        except unreachable() as error:
            raise unfetched(model, error) from None
    try:
        config: dict[str, Any] = read_json(path)
    except ValueError:
        raise UserError(f"{path} is damaged", hint="download or copy the model again") from None
    return config


def _download(model: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                model,
                revision=revision,
                allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.py"],
            )
        )
    except unreachable() as error:
        raise unfetched(model, error) from None


def num_layers_of(model: str) -> int:
    """Return how many decoder layers a model has, from its config.json alone.

    Raises: UserError when it does not say.
    """
    config = read_json(locate(model) / "config.json")
    text = config.get("text_config", config)
    if "num_hidden_layers" not in text:
        raise UserError(f"the config.json of {model} names no num_hidden_layers")
    return int(text["num_hidden_layers"])
