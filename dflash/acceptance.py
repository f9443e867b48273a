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

from dflash.attention import Layout, group_bytes
from dflash.drafter import Drafter, block_input
from dflash.loss import rows_within

# --- of cycles ----------------------------------------------------------------------------------


def figures(cycles_of: Iterable[list[int]], block_size: int) -> dict[str, Any]:
    """Acceptance figures of some responses, each given by the tokens gained in its cycles.

    Those of `averages`, and `per_slot[k-1]`, the share of cycles in which slot k was accepted.
    """
    lists = [c for c in cycles_of if c]
    counts = [(sum(c), len(c)) for c in lists]
    return {**averages(counts), "per_slot": per_slot(lists, block_size)}


def per_slot(cycles_of: Iterable[list[int]], block_size: int) -> list[float]:
    """The share of cycles in which slot k was accepted, for k from 1; empty without cycles."""
    cycles = [x for c in cycles_of for x in c]
    slots = range(1, block_size) if cycles else ()
    return [sum(x > k for x in cycles) / len(cycles) for k in slots]


def averages(counts: list[tuple[int, int]]) -> dict[str, Any]:
    """τ of some responses, each given by the tokens of its cycles and their number.

    Those of `taus`, and intervals that hold 95 % of what drawing as many responses with replacement
    gives (bootstrap).
    """
    counts = [(tokens, cycles) for tokens, cycles in counts if cycles]
    rng, draws = random.Random(0), 1000
    drawn = [rng.choices(counts, k=len(counts)) for _ in range(draws)] if counts else []
    found = taus(counts)
    for name, tau in (("tau_mean", _mean), ("tau_pooled", _pooled)):
        of_draws = sorted(tau(sample) for sample in drawn)
        low, high = int(0.025 * draws), int(0.975 * draws) - 1
        found[f"{name}_interval"] = (of_draws[low], of_draws[high]) if drawn else None
    return found


def taus(counts: list[tuple[int, int]]) -> dict[str, Any]:
    """τ of some responses, each given by the tokens of its cycles and their number.

    `tau_mean` is the mean over responses of each response's mean (the published figure),
    `tau_pooled` the tokens of all cycles over their number; both count the bonus token, not the
    prefill's. Responses that ended with the prefill's token have no cycle and are left out of both.
    """
    counts = [(tokens, cycles) for tokens, cycles in counts if cycles]
    return {
        "responses": len(counts),
        "cycles": sum(cycles for _, cycles in counts),
        "tau_mean": _mean(counts) if counts else None,
        "tau_pooled": _pooled(counts) if counts else None,
    }


def _mean(counts: list[tuple[int, int]]) -> float:
    return sum(tokens / cycles for tokens, cycles in counts) / len(counts)


def _pooled(counts: list[tuple[int, int]]) -> float:
    return sum(tokens for tokens, _ in counts) / sum(cycles for _, cycles in counts)


# --- of known texts -----------------------------------------------------------------------------


# Of one forward pass: what a document has in training by default, 512 blocks of 16.
SLOTS = 8192


@torch.no_grad()  # not inference mode, whose tensors sharded weights could not be trained with after
def accepted_runs(
    drafter: Drafter,
    embed_VH: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    taps_SD: torch.Tensor,
    ids_S: torch.Tensor,
    anchors_N: torch.Tensor,
    block_size: int | None = None,
    ends_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """How many slots in a row the drafter gets right after each anchor of one text; int64 [N].

    Memory is bounded by the text's hidden states and `SLOTS`, however many anchors there are.

    Args:
        head: the target's output head, [rows, H] -> [rows, V].
        taps_SD: the target's hidden states [S, T·H] as training reads them.
        anchors_N: positions in the text, ascending.
        block_size: slots of a block, B (default: the drafter's).
        ends_N: for each anchor the position behind the last token that its block may guess (default:
            the text's end); slots from there on are wrong.
    """
    block = block_size or drafter.config.block_size
    ends_N = torch.full_like(anchors_N, len(ids_S)) if ends_N is None else ends_N
    some = max(1, SLOTS // block)
    parts = zip(anchors_N.split(some), ends_N.split(some), strict=True)
    runs = [_runs(drafter, embed_VH, head, taps_SD, ids_S, *part, block) for part in parts]
    return torch.cat(runs)


def _runs(drafter, embed_VH, head, taps_SD, ids_S, anchors_N, ends_N, block) -> torch.Tensor:
    """`accepted_runs` in one forward pass.

    The head, whose rows over a vocabulary are the dearest part, is asked slot by slot, and for a
    slot only where all before it were right.
    """
    if not len(anchors_N):
        return anchors_N
    c, kind = drafter.config, ids_S.device.type
    anchors = anchors_N.cpu()
    seen = int(anchors[-1]) + 1  # context rows; none sees the anchor's own, but it has to exist
    rows = c.group_rows(group_bytes(kind), seen, block, taps_SD.dtype.itemsize)
    layout = Layout(torch.tensor([0, seen]), anchors, block, rows)
    x_NBH = block_input(embed_VH, ids_S[anchors_N], block, c.mask_token_id)
    hidden_NBH = drafter(taps_SD[:seen], x_NBH.to(drafter.norm.weight.dtype), layout)
    runs_N = torch.zeros_like(anchors_N)
    going = torch.arange(len(anchors_N), device=anchors_N.device)  # all slots before k were right
    some = rows_within(kind, len(embed_VH))
    for k in range(1, block):
        going = going[anchors_N[going] + k < ends_N[going]]
        if not len(going):
            break
        guesses = torch.cat([head(h).argmax(-1) for h in hidden_NBH[going, k].split(some)])
        going = going[guesses == ids_S[anchors_N[going] + k]]
        runs_N[going] = k
    return runs_N


def walk(runs: list[int]) -> list[int]:
    """The cycles of a response whose token i is followed by `runs[i]` right guesses.

    `runs` begins with the prefill's token and leaves out the last one, after which nothing comes.
    """
    cycles, at = [], 0
    while at < len(runs):
        cycles.append(min(runs[at] + 1, len(runs) - at))
        at += cycles[-1]
    return cycles
