"""From the name a user gives to a model folder on this machine."""

from pathlib import Path

from eyas.errors import UserError
from eyas.targets.demo import DEMO_PREFIX, demo_model_folder


def locate(model: str, revision: str | None = None) -> Path:
    """Return the folder of a local model, a hub id, or ``demo:NAME``; download or make it if needed.

    Raises: UserError when there is no such folder and no such hub model.
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
    return _download(model, revision)


def _download(model: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                model, revision=revision, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model"]
            )
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"target.model={model} is neither a local folder nor a hub model that can be fetched"
            f" ({type(error).__name__})",
            hint="check the spelling, the network, and huggingface-cli login for gated models",
        ) from None
