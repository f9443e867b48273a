"""Numbers that the DFlash paper and its published checkpoints set. Plain Python: imports nothing."""

from __future__ import annotations


def spread_taps(taps: int, num_target_layers: int) -> list[int]:
    """round(1 + i (L-4)/(T-1)) for i in 0..T-1 with Python's rounding, [L//2] for T = 1."""
    if taps == 1:
        return [num_target_layers // 2]
    return [round(1 + i * (num_target_layers - 4) / (taps - 1)) for i in range(taps)]


def gamma(block_size: int) -> float:
    """Decay of the slot weights: 7, 5, 4 at block size 16, 10, 8, else linear."""
    low, high = ((8, 4.0), (10, 5.0)) if block_size <= 10 else ((10, 5.0), (16, 7.0))
    slope = (high[1] - low[1]) / (high[0] - low[0])
    return max(1.0, low[1] + (block_size - low[0]) * slope)
