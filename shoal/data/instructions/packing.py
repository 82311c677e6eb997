"""Packing: puts samples into sequences of one length so that few positions stay empty.

Samples are put in a random order and packed window by window, the longest first, each into the fullest pack that still
has room for it ("best fit decreasing"). Packs depend on the lengths, the capacity and the seed alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from shoal.data.order import permute
from shoal.seeding import mix

WINDOW = 1 << 16
"""How many samples are packed at once."""


def pack(lengths: NDArray[np.int64], capacity: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the indices of the samples pack after pack, and where each pack begins in that list (and its end).

    Every length must be at most `capacity`.
    """
    order = permute(np.arange(len(lengths)), len(lengths), mix(seed, "packing"))
    members: list[int] = []
    bounds = [0]
    for start in range(0, len(order), WINDOW):
        window = order[start : start + WINDOW]
        for one in _pack_window(window, lengths, capacity):
            members += one
            bounds.append(len(members))
    return np.array(members, np.int64), np.array(bounds, np.int64)


def _pack_window(samples: NDArray[np.int64], lengths: NDArray[np.int64], capacity: int) -> Iterator[list[int]]:
    packs_by_room: list[list[list[int]]] = [[] for _ in range(capacity + 1)]
    rooms = 0  # bit r is set if there is a pack with room for r more tokens
    for sample in samples[np.argsort(-lengths[samples], kind="stable")].tolist():
        length = int(lengths[sample])
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1  # the lowest bit: the fullest pack with room
            one = packs_by_room[room].pop()
            if not packs_by_room[room]:
                rooms ^= 1 << room
        else:
            room, one = capacity, []
        one.append(sample)
        packs_by_room[room - length].append(one)
        rooms |= 1 << (room - length)
    for packs in packs_by_room:
        yield from packs
