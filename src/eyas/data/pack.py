"""Documents packed into batches of a token budget, the same for the same seed."""

from collections.abc import Sequence

import numpy as np


def pack(lengths: Sequence[int], budget: int, seed: int) -> list[list[int]]:
    """Group document indices so that each group holds at most ``budget`` tokens.

    Documents are taken in a random order and put into the fullest open group that has room
    (best fit). A document longer than the budget has a group to itself.
    """
    order = np.random.default_rng(seed).permutation(len(lengths))
    open_groups: list[tuple[int, list[int]]] = []  # (room left, members)
    full: list[list[int]] = []
    for index in order.tolist():
        fitting = [g for g in range(len(open_groups)) if open_groups[g][0] >= lengths[index]]
        if fitting:
            best = min(fitting, key=lambda g: open_groups[g][0])
            room, members = open_groups.pop(best)
        else:
            room, members = budget, []
        members.append(index)
        room -= lengths[index]
        if room <= 0:
            full.append(members)
        else:
            open_groups.append((room, members))
        # A bounded number of open groups keeps the order random and the packing linear.
        if len(open_groups) > 16:
            fullest = min(range(len(open_groups)), key=lambda g: open_groups[g][0])
            full.append(open_groups.pop(fullest)[1])
    full += [members for _, members in open_groups]
    # Groups close in an order that depends on length; shuffle so that steps are exchangeable.
    return [full[i] for i in np.random.default_rng(seed + 1).permutation(len(full))]
