"""The learning rate: what ``auto`` means, and how the rate rises and falls."""

import math

from eyas.config.schema import TrainSettings

# The best rates at width 576. With the root of the width, Muon's is the best of nine at 896 and as good as
# 1.22e-3 at 1536 (benchmarks/LOG.md).
_RATES, _WIDTH = {"muon": 3e-3, "adamw": 2e-3}, 576
# A draft that was trained before is changed less.
_CONTINUED = 0.5
# Where the rate ends, as a share of its peak.
_FLOOR = 0.05


def with_peak_rate(settings: TrainSettings, width: int, continued: bool) -> TrainSettings:
    """Return the settings with a number for ``train.learning_rate``.

    ``auto`` falls with the root of the draft's ``width``, and is lower where the draft continues from a
    trained one (``continued``). It is the same for all kinds of drafts.
    """
    if settings.learning_rate != "auto":
        return settings
    rate = _RATES[settings.optimizer] * math.sqrt(_WIDTH / width) * (_CONTINUED if continued else 1.0)
    return settings.model_copy(update={"learning_rate": float(f"{rate:.3g}")})


def learning_rate(step: int, num_steps: int, settings: TrainSettings) -> float:
    """Return the rate of step 0, 1, ...: linear warm-up, then half a cosine down to a twentieth.

    ``settings.learning_rate`` must be a number (``with_peak_rate``).
    """
    peak = float(settings.learning_rate)
    warmup = max(1, round(settings.warmup_share * num_steps))
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, num_steps - warmup)
    return peak * (_FLOOR + (1 - _FLOOR) * 0.5 * (1 + math.cos(math.pi * progress)))
