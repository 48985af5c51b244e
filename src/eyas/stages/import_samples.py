"""extract.prepared_data: samples prepared elsewhere become this run's prepared folder."""

from pathlib import Path

from eyas.capture.import_samples import fingerprint_of_source, import_samples
from eyas.data.prepared import is_whole
from eyas.errors import UserError
from eyas.files import remove_folder
from eyas.progress import say
from eyas.run_folder import read_record
from eyas.stages.run_context import RunContext, begin, finish


def import_prepared(context: RunContext, source: Path) -> None:
    """Fill the run's prepared folder from ``source``, once.

    Raises: UserError for a source that is neither a prepared folder nor a JSONL, or that is not usable.
    """
    config = context.config
    if config.regenerate.enabled:
        raise UserError(
            "extract.prepared_data gives the samples, but regenerate.enabled is true",
            hint="set regenerate.enabled=false",
        )
    read_record(source)  # refuses a folder of a version that is not read
    inputs = {
        "imported": fingerprint_of_source(source),
        "max_length": config.data.max_length,
        "validation_fraction": config.data.validation_fraction,
        "seed": config.seed,
    }
    folder = context.folder("prepare")
    is_new = not folder.exists()
    if not begin(context, "prepare", inputs, lambda: is_whole(folder)):
        return
    folder = context.folder("prepare")
    try:
        manifest = import_samples(source, folder, context.spec, config.data, config.seed)
    except UserError:
        if is_new:  # so that the same command works once the data are fixed
            remove_folder(folder)
        raise
    finish(context, "prepare", manifest["fingerprint"], counts=manifest["counts"], drops=manifest["drops"])
    num_dropped = sum(manifest["drops"].values())
    say(f"extract: took {manifest['counts']['train_samples']} samples from {source}, {num_dropped} dropped")
