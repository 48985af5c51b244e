"""How many tokens a run will have: counted, given, measured on a few rows, or guessed from characters."""

from collections.abc import Sequence
from pathlib import Path

from eyas.config.schema import RunConfig
from eyas.plan.estimates import Tokens
from eyas.plan.measure_rates import MeasuredRates, Rows
from eyas.run_folder import read_record

_CHARACTERS_PER_TOKEN = 4


def counted_tokens(folders: Sequence[Path]) -> Tokens | None:
    """Return what the first of ``folders`` counts whose samples are complete."""
    for folder in folders:
        record = read_record(folder)
        counts = record.get("counts") if record and record["done"] else None
        if counts and counts.get("train_tokens"):
            train, held_out = counts["train_tokens"], counts.get("held_out_tokens", 0)
            supervised = counts["train_supervised_tokens"] + counts.get("held_out_supervised_tokens", 0)
            conversations = counts["train_conversations"] + counts.get("held_out_conversations", 0)
            share = supervised / (train + held_out)
            return Tokens(train, held_out, share, conversations, f"counted in {folder}", exact=True)
    return None


def given_tokens(config: RunConfig, number: int) -> Tokens:
    share = config.data.validation_fraction
    return Tokens(
        train=number * (1 - share),
        held_out=number * share,
        supervised_share=0.5,
        conversations=number / config.data.max_length,
        basis="given; half of them supervised, samples of full length",
    )


def expected_tokens(config: RunConfig, rows: Rows, measured: MeasuredRates | None) -> Tokens:
    """Estimate the tokens of the sources from a sample of their ``rows``."""
    share = config.data.validation_fraction
    seen = f"{len(rows.sample):,} of {'' if rows.exact else 'about '}{rows.total:,.0f} rows"
    if measured is not None:
        conversations = rows.total * measured.kept_share
        total = conversations * measured.tokens_per_conversation
        basis = f"measured on {seen}" + (", answers on fewer" if config.regenerate.enabled else "")
        return Tokens(total * (1 - share), total * share, measured.supervised_share, conversations, basis)
    characters = sum(len(str(row)) for row in rows.sample) / max(1, len(rows.sample))
    prompt, answer = characters / _CHARACTERS_PER_TOKEN, 0.0
    if config.regenerate.enabled:
        answer = float(config.regenerate.max_new_tokens)
    length = min(prompt + answer, config.data.max_length)
    total = rows.total * length
    supervised = min(1.0, answer / length) if answer else 0.5
    basis = f"guessed from {seen}: {_CHARACTERS_PER_TOKEN} characters a token" + (
        ", answers of full length" if answer else ""
    )
    return Tokens(total * (1 - share), total * share, supervised, rows.total, basis)
