"""From the name a user gives to a model folder on this machine."""

from contextlib import suppress
from pathlib import Path

from eyas.errors import UserError
from eyas.targets.adapter import ADAPTER_CONFIG, refuse_adapter
from eyas.targets.demo import DEMO_PREFIX, demo_model_folder
from eyas.targets.files import is_url, unreachable
from eyas.targets.remote import DESCRIBING, describe_hub, describe_url, unfetched
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
        refuse_adapter(folder, folder)
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
    if is_url(model):
        return False
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(model, "config.json"), str)


def locate_config(model: str, revision: str | None = None) -> tuple[Path, bool]:
    """Return a folder with a model's config.json, and whether the rest of its description is there too.

    Of a hub model that was not downloaded before, only config.json is fetched.
    Raises: UserError as ``locate`` does.
    """
    if is_url(model):
        return describe_url(model), True
    if folder := _local(model) or _downloaded(model, revision):
        return folder, True
    try:
        return _fetch(model, "config.json", revision).parent, False
    except unreachable() as error:
        with suppress(*unreachable()):  # an adapter's repository may have no config.json
            refuse_adapter(_fetch(model, ADAPTER_CONFIG, revision).parent, model)
        raise unfetched(model, error) from None


def _fetch(model: str, name: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(model, name, revision=revision))


def _download(model: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        folder = Path(
            snapshot_download(model, revision=revision, allow_patterns=[*DESCRIBING, "*.safetensors"])
        )
    except unreachable() as error:
        raise unfetched(model, error) from None
    refuse_adapter(folder, model)
    return folder
