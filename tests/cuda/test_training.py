"""Training on the device: every backend, checkpoint mode, label and optimiser gives the CPU's weights."""

from __future__ import annotations

import pytest
import torch
from support.cuda import device, kernels

from dflash import train


def weights(trainer) -> dict[str, torch.Tensor]:
    drafter, facts = trainer.run()
    assert facts["skipped_steps"] == 0
    return {n: p.detach().cpu() for n, p in drafter.named_parameters()}


def assert_close(found, wanted, tolerance=2e-2):
    for name, want in wanted.items():
        off = (found[name] - want).norm() / want.norm()
        assert off <= tolerance, (name, float(off))


class Watched(train.Trainer):
    """Notes where the host waits in each step."""

    def _step(self, *args):
        with device.waits() as waits:
            found = super()._step(*args)
        self.waits = [*getattr(self, "waits", []), waits]
        return found


def test_a_step(trainer):
    for kw in [
        {},
        {"loss": {"labels": "soft", "weights": "dpace"}},
        {"optimizer": "muon", "ema": 0.9, "loss": {"labels": "argmax", "head_tokens": 100}},
    ]:
        t = trainer(kw, {"micro_batch": 1}, kind=Watched, folder=str(len(str(kw))))
        t.run()
        print(kw)
        for w in t.waits:
            print(w)
    assert 0
