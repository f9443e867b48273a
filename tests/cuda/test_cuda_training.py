"""Training on the device: the CPU's weights in every mode, and no wait but those that are known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.cuda import device, kernels

from dflash import attention, train
from dflash.attention import BACKENDS
from dflash.drafter import CHECKPOINTING
from dflash.errors import UserError


def weights(trainer) -> dict[str, torch.Tensor]:
    drafter, facts = trainer.run()
    assert facts["skipped_steps"] == 0
    return {n: p.detach().cpu() for n, p in drafter.named_parameters()}


def assert_close(found, wanted, tolerance):
    for name, want in wanted.items():
        off = (found[name] - want).norm() / want.norm()
        assert off <= tolerance, (name, float(off))


@pytest.fixture
def any_clear_row(monkeypatch):
    """Small documents have parts without a mask too."""
    monkeypatch.setattr(attention, "CLEAR_ROWS", 4)


class Watched(train.Trainer):
    """Notes where the host waits in each step."""

    def _step(self, *args):
        with device.waits() as waits:
            found = super()._step(*args)
        self.waits = [*getattr(self, "waits", []), waits]
        return found


def test_the_whole_workflow_ran(finished):
    """Answering, extracting, training three drafters, evaluating, export and report, without a fault."""
    results = Path(finished[0]) / "results"
    log = (results / "logs/train/soft.log").read_text()
    assert "on cuda:0" in log and "efficient (masked), flash (no mask)" in log
    for name in finished[1]["drafters"]:
        found = json.loads((results / f"evaluate/{name}/heldout.json").read_text())
        lossless = found["overall"]["lossless"]
        assert lossless["identical"] == lossless["checked"] > 0
        assert device.NAME in found["measured_on"]
    extract = (results / "logs/extract/toy.00000-of-00001.log").read_text()
    assert "on cuda" in extract


@pytest.mark.usefixtures("any_clear_row")
@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "flex"])
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_every_backend_and_checkpoint_mode(trainer, backend, checkpointing):
    training = {"dtype": "float32", "max_steps": 2}
    machine = {"attention": backend, "checkpointing": checkpointing, "micro_batch": 2}
    machine["group_rows"] = 16
    found = weights(trainer(training, machine))
    assert_close(found, weights(trainer(training, on="cpu")), 2e-3)
    fused = backend in ("split", "chunked", "gather")
    assert (kernels.calls["efficient"] > 0) == fused and not kernels.calls["flash"]


@pytest.mark.usefixtures("any_clear_row")
@pytest.mark.parametrize("checkpointing", ["none", "layer", "selective"])
@pytest.mark.parametrize("backend", ["split", "chunked"])
def test_bfloat16(trainer, backend, checkpointing):
    machine = {"attention": backend, "checkpointing": checkpointing, "group_rows": 16}
    weights(trainer({"max_steps": 1}, machine, folder="first"))  # with the kernels' self-check
    kernels.calls.clear()
    found = weights(trainer(machine=machine))
    assert kernels.calls["efficient backward"] > 0
    assert (kernels.calls["flash backward"] > 0) == (backend == "split")
    assert_close(found, weights(trainer(on="cpu")), 3e-2)


def test_flex_says_that_it_does_not_compile_here(trainer):
    with pytest.raises(
        UserError, match="flex does not compile here .*; use machine.train.attention: split"
    ):
        trainer(machine={"attention": "flex", "pad_context": 512, "pad_blocks": 64}).run()


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_without_its_compiler(trainer, monkeypatch):
    """What is handed to the compiler: masks, lengths and heads of the padded shapes."""
    from torch.nn.attention.flex_attention import flex_attention

    from dflash import attention

    monkeypatch.setattr(attention, "_compiled_flex", lambda: flex_attention)
    monkeypatch.setattr(torch, "compile", lambda function, **kwargs: function)
    padded = {"attention": "flex", "pad_context": 512, "pad_blocks": 64}
    found = weights(trainer({"dtype": "float32"}, padded))
    assert_close(found, weights(trainer({"dtype": "float32"}, on="cpu")), 1e-4)


LOSSES = {
    "decay": {},
    "dpace": {"weights": "dpace"},
    "argmax": {"labels": "argmax"},
    "soft": {"labels": "soft", "weights": "dpace"},
    "everywhere, reduced head": {"labels": "soft", "positions": "all", "head_tokens": 60},
}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("loss", LOSSES)
def test_every_label_weight_and_optimiser_without_a_wait_more(trainer, loss, optimizer):
    """Five packs a step: the host waits three times for the pack before the last one, so that it is
    not further ahead, once for what was counted and once for the norm of the gradient."""
    training = {"dtype": "float32", "optimizer": optimizer, "loss": LOSSES[loss], "ema": 0.9}
    watched = trainer(training, {"micro_batch": 1}, kind=Watched)
    found = weights(watched)
    # Muon's products are in bfloat16
    near = 2e-2 if optimizer == "muon" else 2e-3
    assert_close(found, weights(trainer(training, {"micro_batch": 2}, on="cpu")), near)
    known = ["event.synchronize at gradient.py:on_device"] * 3
    known += ["copy to the host at gradient.py:accumulate"]
    known += ["aten::_local_scalar_dense at gradient.py:gradient_norm"]
    assert watched.waits == [known] * 3


def test_waits_of_a_step_do_not_grow_with_what_it_computes(trainer):
    """More layers, sliding windows and groups: two waits for a step of two packs."""
    training = {"max_steps": 2}
    machine = {"micro_batch": 3, "group_rows": 8, "checkpointing": "selective"}
    for more in ({}, {"num_hidden_layers": 4, "sliding_window": 24}):
        watched = trainer(training, machine, kind=Watched, folder=f"run{len(more)}", **more)
        watched.run()
        assert [len(w) for w in watched.waits] == [2, 2], watched.waits


def test_a_padded_pack_is_the_same_training(trainer):
    machine = {"pad_context": 512, "pad_blocks": 64}
    training = {"dtype": "float32"}
    found = weights(trainer(training, machine))
    assert_close(found, weights(trainer(training, on="cpu")), 2e-3)


def test_validation_and_the_best_weights(trainer):
    training = {
        "max_steps": 6,
        "ema": 0.9,
        "dtype": "float32",
        "block_sizes": [2, 4],
        "validation": {"share": 0.2, "times": 3},
    }
    found, facts = trainer(training).run()
    wanted, others = trainer(training, on="cpu").run()
    pairs = zip(facts["validations"], others["validations"], strict=True)
    for mine, theirs in pairs:
        assert mine["block_size"] == theirs["block_size"]
        assert abs(mine["tau_mean"] - theirs["tau_mean"]) < 0.1
    assert facts["best"]["step"] in (2, 4, 6) and next(found.parameters()).device.type == "cpu"


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_that_is_stopped_goes_on_from_its_checkpoint(trainer, optimizer):
    """Weights, moments and averages return to the device; the next step finds all there."""
    training = {"max_steps": 4, "ema": 0.9, "optimizer": optimizer}
    whole = weights(trainer(training, folder="whole"))

    class Stops(train.Trainer):
        def _step(self, plan, *args):
            leave, late = super()._step(plan, *args)
            return leave or plan.step == 1, late

    with pytest.raises(train.Interrupted):
        trainer(training, folder="parts", kind=Stops).run()
    resumed = trainer(training, folder="parts")
    assert resumed.state.step == 2
    for optimizer_ in resumed.optimizers:
        for p, moments in optimizer_.state.items():
            assert {m.device for m in moments.values()} == {p.device} == {torch.device("cuda", 0)}
    assert_close(weights(resumed), whole, 1e-6)


def test_on_one_device_or_the_other_the_run_goes_on(trainer):
    training = {"max_steps": 4, "dtype": "float32"}

    class Stops(train.Trainer):
        def _step(self, plan, *args):
            leave, late = super()._step(plan, *args)
            return leave or plan.step == 1, late

    with pytest.raises(train.Interrupted):
        trainer(training, folder="moved", kind=Stops).run()
    resumed = trainer(training, folder="moved", on="cpu")
    assert resumed.state.step == 2
    assert_close(weights(resumed), weights(trainer(training, on="cpu")), 2e-3)


def test_a_gradient_that_is_not_finite_is_written_down(trainer, monkeypatch, tmp_path):
    made = trainer({"nonfinite": "skip", "max_steps": 2})
    original = made.drafter.norm.forward
    calls = []

    def spoil(x):
        calls.append(1)
        return original(x) * (float("nan") if len(calls) == 1 else 1.0)

    monkeypatch.setattr(made.drafter.norm, "forward", spoil)
    _, facts = made.run()
    assert facts["skipped_steps"] == 1
    (report,) = (tmp_path / "run-cuda").glob("nonfinite-*/report.json")
    assert len(json.loads(report.read_text())["sample_ids"]) == 5


def test_memory_that_does_not_suffice_ends_training_with_torchs_own_error(trainer):
    made = trainer()
    with device.limit(100 << 10), pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        made.run()


def test_a_tied_table_lies_on_the_device_once(trainer):
    before = torch.cuda.memory_allocated()
    made = trainer({"dtype": "float32"})
    assert made.head.embed_VH is made.head.head_VH
    table = made.head.embed_VH.numel() * 4
    states = made.weights * 4
    assert torch.cuda.memory_allocated() - before < 2 * table + states


def test_times_and_memory_are_those_of_the_device(trainer):
    _, facts = trainer({"max_steps": 3}).run()
    line = facts["history"][-1]
    assert line["peak_memory_mb"] == round(torch.cuda.max_memory_allocated() / 1e6, 1)
    assert line["seconds"]["forward"] > 0 and line["seconds"]["backward"] > 0


def test_profiled_steps_are_recorded(trainer, tmp_path, capsys):
    trainer(machine={"profile_steps": [1, 1]}).run()
    assert (tmp_path / "run-cuda" / "profile-1-1.json").stat().st_size > 10_000
    assert "profile of steps 1 to 1" in capsys.readouterr().out
