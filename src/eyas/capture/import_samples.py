"""Samples prepared elsewhere become this run's prepared folder: another run's, or a JSONL of token ids."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from eyas.config.schema import DataSettings
from eyas.data.dedup_and_split import below_share
from eyas.data.fields import BadRow, Fields
from eyas.data.prepared import (
    SPLITS,
    PreparedWriter,
    read_conversations,
    read_manifest,
    read_samples,
)
from eyas.data.samples import mask_ends
from eyas.data.sources import Drop
from eyas.data.token_rows import MASK_KEYS, read_token_row
from eyas.data.training_flags import says_trained
from eyas.errors import ContractError, UserError
from eyas.files import sha256_of_file
from eyas.progress import say
from eyas.types import TargetSpec, TokenizedSample


def fingerprint_of_source(source: Path) -> str:
    """Return what identifies the samples of a prepared folder or a JSONL file.

    Raises: UserError when it does not exist.
    """
    if not source.exists():
        raise UserError(f"there is no {source}", hint="set extract.prepared_data to a folder or a JSONL file")
    return str(read_manifest(source)["fingerprint"]) if source.is_dir() else sha256_of_file(source)


def import_samples(
    source: Path, folder: Path, spec: TargetSpec, data: DataSettings, seed: int
) -> dict[str, Any]:
    """Fill the prepared folder ``folder`` from ``source``; return its manifest.

    Raises: UserError for a source that is neither, or a line that holds no token ids.
    """
    with PreparedWriter(folder, spec.vocab_size) as writer:
        if source.is_dir():
            facts = _copy_folder(writer, source)
        else:
            facts = _read_jsonl(writer, source, spec, data, seed)
        if not writer.counts["train_samples"]:
            reasons = ", ".join(f"{r} ({n} rows)" for r, n in writer.drops.most_common(1)) or "no rows"
            raise UserError(
                f"{source} holds no sample to train on with a supervised token",
                hint=f"what is wrong with it: {reasons}; or lower data.validation_fraction",
            )
    kept = sum(writer.counts.get(f"{split}_samples", 0) for split in SPLITS)
    return writer.finish(**facts, num_read=kept + sum(writer.drops.values()))


def _copy_folder(writer: PreparedWriter, source: Path) -> dict[str, Any]:
    manifest = read_manifest(source)
    for split in SPLITS:
        for sample in read_samples(source, split):
            writer.add_sample(split, sample)
    for split, conversation in read_conversations(source):
        writer.add_conversation(split, conversation)
    return {key: manifest[key] for key in ("tokenizer_fingerprint", "template_fingerprint")}


def _read_jsonl(
    writer: PreparedWriter, source: Path, spec: TargetSpec, data: DataSettings, seed: int
) -> dict[str, Any]:
    say(f"extract: {source.name} names no tokenizer; its ids are taken to be the target's")
    seen: set[str] = set()
    ends: Counter[str] = Counter()
    unused: Counter[str] = Counter()
    num_rows = 0
    for number, row in _rows(source):
        num_rows = number
        sample = _sample(source, number, row, data.max_length, unused)
        if isinstance(sample, Drop):
            writer.drop(sample)
            continue
        if sample.sample_id in seen:
            raise UserError(f"{source} line {number}: the id {sample.sample_id!r} is there twice")
        seen.add(sample.sample_id)
        ends += mask_ends(sample, spec.eos_token_ids)
        held_out = below_share(sample.sample_id, data.validation_fraction, str(seed))
        writer.add_sample("held_out" if held_out else "train", sample)
    if sum(writer.drops.values()) > data.max_drop_share * num_rows:
        reason, count = writer.drops.most_common(1)[0]
        raise UserError(
            f"{source}: more rows are unusable than data.max_drop_share={data.max_drop_share}; "
            f"most often: {reason} ({count} rows)",
            hint="mend the data, or raise data.max_drop_share",
        )
    for where in ("before", "behind"):
        if ends[where] > ends["at"]:
            say(
                f"  warning: {ends[where]} of {ends.total()} masked spans end one token {where} the end of "
                f"their turn, {ends['at']} at it: the loss_mask may be shifted by one"
            )
    if unused:
        say("  columns not used: " + ", ".join(f"{key} ({n:,})" for key, n in unused.most_common()))
    return {
        "unused_columns": dict(unused.most_common()),
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


def _sample(
    source: Path, number: int, row: dict[str, Any], max_length: int, unused: Counter[str]
) -> TokenizedSample | Drop:
    sample_id = str(row.get("id", f"line-{number:08d}"))
    fields = Fields(row)
    fields.take("id"), fields.take("input_ids")
    try:
        if fields.has(*MASK_KEYS[1:], "labels", "attention_mask"):
            if not fields.has(*MASK_KEYS, "labels"):
                fields = Fields({**row, "loss_mask": [1] * len(row["input_ids"])})
            row = {
                "input_ids": row["input_ids"],
                "loss_mask": read_token_row(fields, sample_id, "").loss_mask,
            }
        fields.take("id"), fields.take("loss_mask")
        if says_trained(fields, {}) is False:
            raise BadRow("marked_not_trained")
    except BadRow as error:
        return Drop(sample_id, f"{source}:{number}", str(error))
    unused.update(fields.unread())
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
