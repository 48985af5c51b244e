"""Samples prepared elsewhere become this run's prepared folder: another run's, or a JSONL of token ids."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from eyas.data.dedup_and_split import below_share
from eyas.data.prepared import (
    SPLITS,
    PreparedWriter,
    is_whole,
    read_conversations,
    read_manifest,
    read_samples,
)
from eyas.data.samples import mask_ends
from eyas.data.sources import Drop
from eyas.errors import ContractError, UserError
from eyas.files import remove_folder, sha256_of_file
from eyas.progress import say
from eyas.stages.run_context import RunContext, begin, finish
from eyas.types import TokenizedSample


def adopt(context: RunContext, source: Path) -> None:
    """Fill the run's prepared folder from ``source``, once.

    Raises: UserError for a source that is neither, or a line that holds no token ids.
    """
    if context.config.regenerate.enabled:
        raise UserError(
            "extract.prepared_data gives the samples, but regenerate.enabled is true",
            hint="set regenerate.enabled=false",
        )
    if not source.exists():
        raise UserError(f"there is no {source}", hint="set extract.prepared_data to a folder or a JSONL file")
    data = context.config.data
    identity = read_manifest(source)["fingerprint"] if source.is_dir() else sha256_of_file(source)
    inputs = {
        "imported": identity,
        "max_length": data.max_length,
        "validation_fraction": data.validation_fraction,
    }
    folder = context.folder("prepare")
    is_new = not folder.exists()
    if not begin(context, "prepare", inputs | {"seed": context.config.seed}, lambda: is_whole(folder)):
        return
    try:
        with PreparedWriter(folder, context.spec.vocab_size) as writer:
            facts = _copy_folder(writer, source) if source.is_dir() else _read_jsonl(writer, source, context)
            if not writer.counts["train_samples"]:
                reasons = ", ".join(f"{r} ({n} rows)" for r, n in writer.drops.most_common(1)) or "no rows"
                raise UserError(
                    f"{source} holds no sample to train on with a supervised token",
                    hint=f"what is wrong with it: {reasons}; or lower data.validation_fraction",
                )
    except UserError:
        if is_new:  # so that the same command goes on once the data are mended
            remove_folder(folder)
        raise
    manifest = writer.finish(**facts)
    finish(context, "prepare", manifest["fingerprint"], counts=manifest["counts"], drops=manifest["drops"])
    num_dropped = sum(manifest["drops"].values())
    say(f"extract: took {manifest['counts']['train_samples']} samples from {source}, {num_dropped} dropped")


def _copy_folder(writer: PreparedWriter, source: Path) -> dict[str, Any]:
    manifest = read_manifest(source)
    for split in SPLITS:
        for sample in read_samples(source, split):
            writer.add_sample(split, sample)
    for split, conversation in read_conversations(source):
        writer.add_conversation(split, conversation)
    return {key: manifest[key] for key in ("tokenizer_fingerprint", "template_fingerprint")}


def _read_jsonl(writer: PreparedWriter, source: Path, context: RunContext) -> dict[str, Any]:
    config = context.config
    say(f"extract: {source.name} names no tokenizer; its ids are taken to be the target's")
    seen: set[str] = set()
    ends: Counter[str] = Counter()
    num_rows = 0
    for number, row in _rows(source):
        num_rows = number
        sample = _sample(source, number, row, config.data.max_length)
        if isinstance(sample, Drop):
            writer.drop(sample)
            continue
        if sample.sample_id in seen:
            raise UserError(f"{source} line {number}: the id {sample.sample_id!r} is there twice")
        seen.add(sample.sample_id)
        ends += mask_ends(sample, context.spec.eos_token_ids)
        held_out = below_share(sample.sample_id, config.data.validation_fraction, str(config.seed))
        writer.add_sample("held_out" if held_out else "train", sample)
    if sum(writer.drops.values()) > config.data.max_drop_share * num_rows:
        reason, count = writer.drops.most_common(1)[0]
        raise UserError(
            f"{source}: more rows are unusable than data.max_drop_share={config.data.max_drop_share}; "
            f"most often: {reason} ({count} rows)",
            hint="mend the data, or raise data.max_drop_share",
        )
    for where in ("before", "behind"):
        if ends[where] > ends["at"]:
            say(
                f"  warning: {ends[where]} of {ends.total()} masked spans end one token {where} the end of "
                f"their turn, {ends['at']} at it: the loss_mask may be shifted by one"
            )
    spec = context.spec
    return {
        "tokenizer_fingerprint": spec.tokenizer_fingerprint,
        "template_fingerprint": spec.template_fingerprint,
    }


def _rows(source: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with source.open("rb") as f:
        for number, line in enumerate(f, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                raise UserError(f"{source} line {number} is not JSON") from None
            if not isinstance(row, dict) or not isinstance(row.get("input_ids"), list):
                raise UserError(
                    f"{source} line {number} has no input_ids",
                    hint='each line is {"input_ids": [...], "loss_mask": [...]}; the mask may be left out',
                )
            yield number, row


def _sample(source: Path, number: int, row: dict[str, Any], max_length: int) -> TokenizedSample | Drop:
    sample_id = str(row.get("id", f"line-{number:08d}"))
    try:
        ids = np.asarray(row["input_ids"], dtype=np.int32)
        mask = np.asarray(row.get("loss_mask", [1] * len(ids))).astype(bool)
    except (ValueError, TypeError, OverflowError) as error:
        raise UserError(f"{source} line {number}: {error}") from None
    if ids.shape != mask.shape or ids.ndim != 1:
        raise UserError(f"{source} line {number}: {ids.shape} token ids but {mask.shape} loss_mask")
    cut = bool(len(ids) > max_length and mask[max_length - 1] and mask[max_length])
    try:
        return TokenizedSample(sample_id, ids[:max_length], mask[:max_length], cut)
    except ContractError as error:
        return Drop(sample_id, str(source), error.what.partition(": ")[2])
