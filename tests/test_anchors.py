"""Anchors and orders are pure functions of their key."""

import numpy as np

from dflash import anchors


def mask(text: str) -> np.ndarray:
    return np.array([c == "1" for c in text])


def test_candidates_are_response_tokens_with_a_supervised_next_one():
    assert anchors.candidates(mask("00111011")).tolist() == [2, 3, 6]
    assert anchors.candidates(mask("0001")).tolist() == []
    assert anchors.candidates(mask("1")).tolist() == []


def test_choice_depends_on_seed_epoch_and_sample_alone():
    m = mask("0" * 10 + "1" * 90)
    first = anchors.choose(m, 20, 0, 0, "a")
    assert first.tolist() == sorted(set(first.tolist())) and len(first) == 20
    assert first.tolist() == anchors.choose(m, 20, 0, 0, "a").tolist()
    for key in [(1, 0, "a"), (0, 1, "a"), (0, 0, "b")]:
        assert anchors.choose(m, 20, *key).tolist() != first.tolist()
    assert anchors.choose(m, 500, 0, 0, "a").tolist() == list(range(10, 99))


def test_choice_is_pinned():
    """A change of this function would silently change every training."""
    assert anchors.choose(mask("0" * 5 + "1" * 20), 6, 7, 2, "abc").tolist() == PINNED
    assert anchors.permutation(8, "x", 1).tolist() == PINNED_ORDER


def test_choice_is_uniform():
    m, seen = mask("1" * 21), np.zeros(20)
    for epoch in range(2000):
        seen[anchors.choose(m, 5, 0, epoch, "a")] += 1
    assert abs(seen / 2000 - 0.25).max() < 0.05


PINNED = [7, 9, 11, 16, 18, 19]
PINNED_ORDER = [0, 6, 2, 1, 5, 3, 4, 7]
