"""Of ranks that end one after another, the first that failed says why: the others see what is left of it."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

from eyas.errors import EyasError
from eyas.train.ranks import Ranks

_KEY = "eyas/failed"
# How long a rank that has seen another one leave waits for it to say why.
_PATIENCE_S = 60.0
# An error that is not ours may be such a sight too: a sum that its connection broke under.
_DOUBT_S = 3.0


class RankLeft(Exception):
    """Another rank has gone, and says why itself."""


@contextlib.contextmanager
def report_first_failure(ranks: Ranks) -> Iterator[None]:
    """Let an error through on the first rank that has one; on the others SystemExit with its exit code."""
    try:
        yield
    except SystemExit:
        raise
    except BaseException as error:
        if ranks.size > 1:
            code = _code_of_the_first(ranks, error)
            if code is not None:
                raise SystemExit(code) from None
        raise


def _code_of_the_first(ranks: Ranks, error: BaseException) -> int | None:
    """Return the exit code of the rank that failed before this one, or None when this one is the first."""
    if isinstance(error, KeyboardInterrupt) and not ranks.is_first:
        return 130
    # The store lives where the ranks met, and outlives each of them.
    store = distributed_c10d._get_default_store()
    own = f"{ranks.rank} {130 if isinstance(error, KeyboardInterrupt) else getattr(error, 'exit_code', 1)}"
    try:
        if isinstance(error, RankLeft):
            with contextlib.suppress(dist.DistStoreError):
                store.wait([_KEY], timedelta(seconds=_PATIENCE_S))
        elif not isinstance(error, EyasError | KeyboardInterrupt):
            time.sleep(_DOUBT_S)
        rank, code = store.compare_set(_KEY, "", own).decode().split()
    except KeyboardInterrupt:  # ended because another one has failed
        return 1
    except (RuntimeError, dist.DistStoreError):
        return None
    if int(rank) != ranks.rank:
        return int(code)
    if threading.current_thread() is threading.main_thread():
        # The others leave now, and what watches over all would end this one before it has spoken.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return None
