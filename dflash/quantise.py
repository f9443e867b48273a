"""Hidden states in eight bits: value = q · scale of its token and tap · scale of its channel and tap.

Legend: C tokens of a chunk · S tokens · T taps · H hidden width.

Some channels are a hundred times larger than others at every token, and the first token of a document
is larger than the rest in a few of them (|x| about 24,000 where 10 is usual). Two scales take both
out, and what is left fills eight bits evenly. Channels are scaled to the largest value they have in
the chunk, measured in units of its token's root mean square; each token then to its largest value.
No scale is shared between taps. On the demo's features the error of a token is 0.6 % of its norm,
0.9 % at most (docs/features.md).
"""

from __future__ import annotations

import numpy as np

STEPS = 127  # -128 is never made: it is the fill value
BLOCK_BYTES = 1 << 20  # of float32 temporaries, which then stay in the cache


def quantise(bits_CTH: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """int8 [C, T, H], float32 token scales [C, T] and channel scales [T, H] of finite bf16 bits."""
    x_CTH = widen(bits_CTH)
    with np.errstate(over="ignore"):  # the norm may be infinite: then only the tokens are scaled
        norm_CT = np.sqrt(np.einsum("cth,cth->ct", x_CTH, x_CTH) / x_CTH.shape[-1])
    size_CTH = np.abs(x_CTH)
    channel_TH = _or_one((size_CTH / _or_one(norm_CT)[..., None]).max(0))
    size_CTH /= channel_TH
    token_CT = _or_one(size_CTH.max(-1) / np.float32(STEPS))
    x_CTH /= channel_TH
    x_CTH /= token_CT[..., None]
    return np.rint(x_CTH).clip(-STEPS, STEPS).astype(np.int8), token_CT, channel_TH


def dequantise(q_STH: np.ndarray, token_ST: np.ndarray, channel_TH: np.ndarray) -> np.ndarray:
    """uint16 [S, T, H], bf16 bits; float32 products, rounded half away from zero.

    Nothing but single products of float32, so every machine gives the same bits.
    """
    bits_STH = np.empty(q_STH.shape, np.uint16)
    step = max(1, BLOCK_BYTES // (4 * channel_TH.size))
    for s in range(0, len(q_STH), step):
        rows = slice(s, s + step)
        x = np.multiply(q_STH[rows], channel_TH, dtype=np.float32)
        x *= token_ST[rows, :, None]
        bits = x.view(np.uint32)
        bits += 0x8000
        bits >>= 16
        bits_STH[rows] = bits
    return bits_STH


def widen(bits: np.ndarray) -> np.ndarray:
    """bf16 bits as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _or_one(scale: np.ndarray) -> np.ndarray:
    """Scales that can be divided by: all-zero tokens and channels get 1."""
    return np.where(scale > 0, scale, np.float32(1))
