"""The optimisation of a training: optimisers, the course of their rates, the average of the weights.

Shapes: O rows · I columns of a matrix.

Rates are functions of the settings and the step number and have no state, so that a resumed run
needs nothing but its step. `docs/recipes.md` says where each default comes from.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dflash.config import Training

# Of Muon's peak rate to AdamW's, where only the latter is set (speculators RFC #979).
MUON_RATE = 10.0

# Kinds of devices for which torch 2.13 has a fused AdamW.
FUSED = {"cpu", "cuda", "hpu", "mps", "mtia", "xpu"}


def warmup_steps(steps: int, training: Training) -> int:
    """Steps with rising rate, of `steps`; may be more than those, which then only rise."""
    if training.warmup_steps is not None:
        return training.warmup_steps
    return math.ceil(training.warmup_share * steps)


def rate(step: int, steps: int, training: Training) -> float:
    """Share of the peak rate at 0-based step `step` of `steps`; above 0 and at most 1.

    It rises by equal amounts to 1 in the last step of warm-up. A falling schedule starts at 1 and
    would reach 0 at step `steps`, one after the last, so that every step moves the weights. With
    `wsd` the fall begins with the last `decay_share` of the steps, or after warm-up if that is later.
    """
    warm = warmup_steps(steps, training)
    if step < warm:
        return (step + 1) / warm
    start = warm
    if training.schedule == "wsd":
        start = max(warm, steps - round(training.decay_share * steps))
    done, of = max(0, step - start), max(1, steps - start)
    match training.schedule:
        case "constant":
            return 1.0
        case "cosine":
            return 0.5 * (1 + math.cos(math.pi * done / of))
        case "linear" | "wsd":
            return 1 - done / of


def make_optimizers(drafter: nn.Module, training: Training) -> list[torch.optim.Optimizer]:
    """AdamW alone, or Muon for the matrices and AdamW for the rest.

    Every group carries its `peak` rate, for `set_rates`. Gains of norms are never decayed. The state
    of a parameter is tensors: AdamW's `step`, `exp_avg`, `exp_avg_sq`, Muon's `momentum_buffer`.

    Muon makes a matrix's momentum nearly orthogonal; its entries then have a root mean square of
    about 1 / sqrt(max(O, I)), whatever the gradient's was. `adjust_lr_fn="match_rms_adamw"`
    multiplies that by 0.2 sqrt(max(O, I)), so that the entries of all matrices move alike, and by
    about as much as AdamW moves them at the same rate (arXiv 2502.16982). speculators trains so, and
    only so can its rates be taken over: with torch's default, sqrt(max(1, O / I)), a matrix moves
    0.2 sqrt(I) times less, 5 times at I = 576 and 13 times at 4096. Weight decay goes by the rate
    before the adjustment.
    """
    matrices = [p for p in drafter.parameters() if p.dim() > 1]
    vectors = {
        "params": [p for p in drafter.parameters() if p.dim() <= 1],
        "weight_decay": 0.0,
    }
    if training.optimizer == "adamw":
        decayed = {"params": matrices, "weight_decay": training.weight_decay}
        return [_adamw([decayed, vectors], training)]
    muon = training.muon
    peak = MUON_RATE * training.lr if muon.lr is None else muon.lr
    orthogonal = torch.optim.Muon(
        [{"params": matrices, "peak": peak}],
        lr=peak,
        weight_decay=muon.weight_decay,
        momentum=muon.momentum,
        nesterov=True,
        ns_steps=muon.steps,
        adjust_lr_fn="match_rms_adamw",
    )
    return [orthogonal, _adamw([vectors], training)]


def _adamw(groups: list[dict], training: Training) -> torch.optim.AdamW:
    """AdamW over groups of parameters, in one kernel where the device has one."""
    return torch.optim.AdamW(
        [group | {"peak": training.lr} for group in groups],
        lr=training.lr,
        betas=training.betas,
        fused=all(p.device.type in FUSED for group in groups for p in group["params"]),
    )


def set_rates(optimizers: Iterable[torch.optim.Optimizer], share: float) -> None:
    """Let every group's next step have this share of its own peak rate."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = share * group["peak"]


class Average:
    """Exponential moving average of a drafter's float32 weights, kept beside them.

    After 0-based step t the average moves towards the weights by 1 - d, with d the smaller of
    `decay` and (1 + t) / (10 + t). With `decay` alone, 0.999 say, the average would still be 95 %
    initial weights after 50 steps; like this they count less than 1e-10. While the second is the
    smaller, the steps up to s weigh about (s / t)^9 together, so that nearly all of the average is
    the last quarter of the training so far. (Dividing by 1 - decay^t, as Adam does, forgets the
    start too, but averages evenly over all the early steps, whose weights are not worth keeping.)
    The rule is TensorFlow's; it needs only t, so that a checkpoint keeps nothing but `tensors`.
    """

    tensors: dict[str, Tensor]  # the averages by parameter name; to be restored in place

    def __init__(self, drafter: nn.Module, decay: float):
        """Start as a copy of the weights; `decay` in [0, 1)."""
        self.decay = decay
        self.weights = dict(drafter.named_parameters())
        self.tensors = {
            name: p.detach().to(torch.float32, copy=True) for name, p in self.weights.items()
        }

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights as 0-based step `step` has left them."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self.tensors.values()), list(self.weights.values()), 1 - decay)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """The drafter holds the averages inside, and bit for bit its own weights again afterwards,
        also after an exception. Takes memory for one more copy of the weights.
        """
        own = {name: p.detach().clone() for name, p in self.weights.items()}
        try:
            self._load(self.tensors)
            yield
        finally:
            self._load(own)

    @torch.no_grad()
    def _load(self, tensors: dict[str, Tensor]) -> None:
        # Values are copied, not storages exchanged: what shards weights holds on to the storages.
        for name, p in self.weights.items():
            p.copy_(tensors[name])
