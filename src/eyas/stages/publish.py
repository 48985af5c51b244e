"""export --push: the draft's folder to a hub repository, with its card."""

import re

from eyas.errors import EyasError, UserError
from eyas.progress import say
from eyas.progress_displays import size
from eyas.stages.results import write_current_card
from eyas.stages.run_context import RunContext
from eyas.targets.files import unreachable

# stage.json is the run's own business: it names folders of this machine.
_PUBLISHED = ("README.md", "config.json", "model.safetensors")


def check_repository(name: str) -> None:
    """Raises: UserError for what is no repository's name."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise UserError(f"--push {name}: not a repository", hint="as in --push owner/name")


def publish(context: RunContext, repository: str, dry_run: bool, private: bool) -> None:
    """Upload the exported draft to OWNER/NAME, or with ``dry_run`` say what would be uploaded.

    Raises: UserError when nobody is logged in who may; EyasError when the hub refuses.
    """
    context.output_of("export")
    write_current_card(context)
    folder = context.folder("export")
    if context.states()["evaluate"].state != "done":
        say("push: nothing is measured yet, and the card says so; push again after eyas evaluate")
    for name in _PUBLISHED:
        say(f"push: {name} ({size((folder / name).stat().st_size)})")
    if dry_run:
        say(f"push: nothing uploaded to {repository} (--dry-run)")
        return
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            allow_patterns=list(_PUBLISHED),
            commit_message=f"{context.drafter.title} draft for {context.config.target.model}",
        )
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else None
        if status in (401, 403):
            raise UserError(f"the hub lets you not write to {repository} (HTTP {status})",
                            hint="log in with: hf auth login (a token that may write)") from None  # fmt: skip
        raise EyasError(f"the hub refused: {str(error).splitlines()[0]}", hint="try again later") from None
    except unreachable() as error:
        raise EyasError(f"the hub cannot be reached or used: {str(error).splitlines()[0]}",
                        hint="check the network, and hf auth login") from None  # fmt: skip
    say(f"push: {commit}")
