"""Eight-bit hidden states: how close they are, and that they do not depend on how they are read."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dflash import quantise as q8
from dflash.quantise import dequantise, quantise


def floats(bits: np.ndarray) -> np.ndarray:
    return torch.from_numpy(bits).view(torch.bfloat16).float().numpy()


def rounded(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()


@pytest.fixture
def states() -> np.ndarray:
    """bf16 bits [C, T, H]: channels and tokens of very different size, massive activations in some."""
    rng = np.random.default_rng(0)
    values = rng.normal(0, 1, (300, 3, 256)) * np.exp(rng.normal(0, 1.5, (3, 256)))
    values *= np.exp(rng.normal(0, 0.5, (300, 3, 1)))
    values[::60, :, 3] = 24_000
    return rounded(values)


def relative_errors(states: np.ndarray, found: np.ndarray) -> np.ndarray:
    exact = floats(states)
    return np.linalg.norm(floats(found) - exact, axis=-1) / np.linalg.norm(exact, axis=-1)


def test_errors_are_below_one_percent_for_every_tap(states):
    errors = relative_errors(states, dequantise(*quantise(states)))
    assert (np.sqrt((errors**2).mean(0)) < 0.01).all() and errors.max() < 0.02


@pytest.mark.parametrize("power", [-110, -90, 60, 110])
def test_errors_are_the_same_for_very_small_and_very_large_states(states, power):
    usual = relative_errors(states, dequantise(*quantise(states)))
    scaled = rounded(floats(states).astype(np.float64) * 2.0**power)
    found = dequantise(*quantise(scaled))
    back = 2.0**-power
    exact, found = (floats(bits).astype(np.float64) * back for bits in (scaled, found))
    errors = np.linalg.norm(found - exact, axis=-1) / np.linalg.norm(exact, axis=-1)
    assert np.sqrt((errors**2).mean()) < 1.05 * np.sqrt((usual**2).mean())


@pytest.mark.filterwarnings("error")
def test_the_smallest_numbers_do_no_harm(states):
    states[:, 0, 5] = states[:, 2] = 0
    states[7, 0, 5] = 1  # the one number of its channel
    states[9] = 0
    states[9, 1, 6] = 1  # of its token
    states[3, 2, 8] = 1  # of its tap
    states[11, 1], states[12, 1] = 0, 0
    states[11, 1, 4], states[12, 1, 4] = 0x4000, 1  # a channel of large scale
    q, token, channel = quantise(states)
    assert (floats(channel) > 0).all() and (token > 0).all() and q.min() >= -127
    found = dequantise(q, token, channel)
    exact = floats(states)
    kept = np.abs(floats(found) - exact) <= 0.02 * np.abs(exact).max(-1, keepdims=True)
    assert kept.all()
    assert found[9, 1, 6] == found[3, 2, 8] == found[12, 1, 4] == 1


def test_channels_need_a_scale(states):
    token = (np.abs(floats(states)).max(-1) / 127).astype(np.float32)
    q = np.rint(floats(states) / token[..., None]).astype(np.int8)
    one = np.full(states.shape[1:], 0x3F80, np.uint16)  # 1.0
    errors = relative_errors(states, dequantise(q, token, one))
    assert np.sqrt((errors**2).mean()) > 0.02


def test_the_fill_value_is_never_made_and_zeros_stay(states):
    states[10] = states[:, 1, 7] = 0
    q, token, channel = quantise(states)
    assert q.min() >= -127 and q.max() == 127
    assert np.isfinite(token).all() and (token > 0).all() and (floats(channel) > 0).all()
    found = dequantise(q, token, channel)
    assert not found[10].any() and not found[:, 1, 7].any()
    assert not dequantise(*quantise(np.zeros((4, 2, 8), np.uint16))).any()


def test_blocks_and_spans_do_not_change_a_bit(states, monkeypatch):
    q, token, channel = quantise(states)
    whole = dequantise(q, token, channel)
    monkeypatch.setattr(q8, "BLOCK_BYTES", 10_000)
    for a, b in zip(quantise(states), (q, token, channel), strict=True):
        assert np.array_equal(a, b)
    assert np.array_equal(dequantise(q, token, channel), whole)
    assert np.array_equal(dequantise(q[37:203], token[37:203], channel), whole[37:203])


def test_products_are_rounded_to_the_nearest_bf16():
    q = np.arange(-127, 128, dtype=np.int8).reshape(1, 1, -1)
    token, channel = np.full((1, 1), 0.3, np.float32), np.full((1, 255), 0x3F80, np.uint16)
    exact = torch.from_numpy(q.astype(np.float32) * np.float32(0.3)).to(torch.bfloat16)
    found = dequantise(q, token, channel)
    assert np.array_equal(found[found != 0], exact.view(torch.uint16).numpy()[found != 0])
