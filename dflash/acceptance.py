"""Acceptance: how many tokens a draft-verify cycle gives, on real cycles and on known texts.

Shapes: S context rows · N blocks · B slots a block · T taps · H hidden width · V vocabulary.

Decoding a text and reading it with the drafter say the same: where a response is the target's own
greedy one, the run of right guesses at its position i is what decoding accepts there, and walking from
the first token by (run + 1) goes through exactly decoding's cycles. So `accepted_runs` and `walk`
measure validation texts without decoding them, at every position at once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import torch

from dflash.attention import Layout
from dflash.drafter import Drafter, block_input
from dflash.loss import rows_within

# --- of cycles ----------------------------------------------------------------------------------


def figures(cycles_of: Iterable[list[int]], block_size: int) -> dict[str, Any]:
    """Acceptance figures of some responses, each given by the tokens gained in its cycles.

    Those of `averages`, and `per_slot[k-1]`, the share of cycles in which slot k was accepted.
    """
    lists = [c for c in cycles_of if c]
    cycles = [x for c in lists for x in c]
    slots = range(1, block_size) if cycles else ()
    return {
        **averages([(sum(c), len(c)) for c in lists]),
        "per_slot": [sum(x > k for x in cycles) / len(cycles) for k in slots],
    }


def averages(counts: list[tuple[int, int]]) -> dict[str, Any]:
    """τ of some responses, each given by the tokens of its cycles and their number.

    `tau_mean` is the mean over responses of each response's mean (the published figure),
    `tau_pooled` the tokens of all cycles over their number; both count the bonus token, not the
    prefill's. Responses that ended with the prefill's token have no cycle and are left out of both.
    The intervals hold 95 % of what drawing as many responses with replacement gives (bootstrap).
    """
    counts = [(tokens, cycles) for tokens, cycles in counts if cycles]
    rng, draws = random.Random(0), 1000
    drawn = [rng.choices(counts, k=len(counts)) for _ in range(draws)] if counts else []
    found: dict[str, Any] = {"responses": len(counts), "cycles": sum(n for _, n in counts)}
    for name, tau in (("tau_mean", _mean), ("tau_pooled", _pooled)):
        found[name] = tau(counts) if counts else None
        taus = sorted(tau(sample) for sample in drawn)
        low, high = int(0.025 * draws), int(0.975 * draws) - 1
        found[f"{name}_interval"] = (taus[low], taus[high]) if taus else None
    return found


def _mean(counts: list[tuple[int, int]]) -> float:
    return sum(tokens / cycles for tokens, cycles in counts) / len(counts)


def _pooled(counts: list[tuple[int, int]]) -> float:
    return sum(tokens for tokens, _ in counts) / sum(cycles for _, cycles in counts)


# --- of known texts -----------------------------------------------------------------------------


@torch.inference_mode()
def accepted_runs(
    drafter: Drafter,
    embed_VH: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    taps_SD: torch.Tensor,
    ids_S: torch.Tensor,
    anchors_N: torch.Tensor,
    block_size: int | None = None,
) -> torch.Tensor:
    """How many slots in a row the drafter gets right after each anchor of one text; int64 [N].

    `taps_SD` are the target's hidden states [S, T·H] as training reads them, `head` its output head
    over [rows, H], `anchors_N` positions in the text. Slots beyond the text's end are wrong.
    """
    block = block_size or drafter.config.block_size
    layout = Layout(torch.tensor([0, len(ids_S)]), anchors_N.cpu(), block)
    x = block_input(embed_VH, ids_S[anchors_N], block, drafter.config.mask_token_id)
    hidden = drafter(taps_SD, x, layout)[:, 1:]
    at = anchors_N[:, None] + torch.arange(1, block, device=anchors_N.device)
    right = at < len(ids_S)
    wanted = ids_S[at.clamp_max(len(ids_S) - 1)]
    rows = max(1, rows_within(hidden.device.type, len(embed_VH)) // (block - 1))
    guesses = torch.cat([head(part).argmax(-1) for part in hidden.split(rows)])
    return (right & (guesses == wanted)).long().cumprod(-1).sum(-1)


def walk(runs: list[int]) -> list[int]:
    """The cycles of a response whose token i is followed by `runs[i]` right guesses.

    `runs` begins with the prefill's token and leaves out the last one, after which nothing comes.
    """
    cycles, at = [], 0
    while at < len(runs):
        cycles.append(min(runs[at] + 1, len(runs) - at))
        at += cycles[-1]
    return cycles
