"""Where blocks begin: a pure function of (seed, epoch, sample id).

The same anchors come out for any number of ranks, workers or resumes, and for any company a document
is packed with.
"""

from __future__ import annotations

import hashlib

import numpy as np


def stream(*key: object) -> np.random.Philox:
    """A bit generator that depends on the key alone. Its raw output never changes with NumPy."""
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    return np.random.Philox(key=int.from_bytes(digest[:16], "little"))


def permutation(n: int, *key: object) -> np.ndarray:
    """The numbers 0..n-1 in an order that depends on the key alone; int64 [n]."""
    return np.argsort(stream(*key).random_raw(n), kind="stable") if n else np.empty(0, np.int64)


def candidates(loss_mask_S: np.ndarray) -> np.ndarray:
    """Positions that can anchor a block; int64.

    In decoding an anchor is a token of the response (the first one comes from the prefill), and the
    slot after it must be supervised, or the block teaches nothing. Blocks may reach past the end:
    decoding meets that too.
    """
    return np.flatnonzero(loss_mask_S[:-1] & loss_mask_S[1:])


def choose(
    loss_mask_S: np.ndarray, count: int, seed: int, epoch: int, sample_id: str
) -> np.ndarray:
    """Up to `count` anchors of one document in one epoch, without repeats, ascending; int64."""
    among = candidates(loss_mask_S)
    order = permutation(len(among), "anchors", seed, epoch, sample_id)
    return np.sort(among[order[:count]])
