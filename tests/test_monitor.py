"""What a training tells while it runs: every figure in its place, and each warning for its cause."""

# ruff: noqa: F811 (fixtures of test_train)

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_train import drafter_settings, features, run  # noqa: F401

from dflash import config, kernels, monitor, progress, train

FIGURES = {
    "step", "epoch", "loss", "accepted_by_position", "first_slot", "gradient_norm", "lr", "tokens",
    "supervised", "labels_outside_head", "skipped_steps", "seconds_per_step", "tokens_per_second",
    "peak_memory_mb", "seconds",
}  # fmt: skip
MEASURED = {
    "step", "block_size", "responses", "cycles", "tau_mean", "tau_pooled", "by_position", "per_slot",
    "kinds",
}  # fmt: skip


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def board(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder))
    found.Reload()
    return found


@pytest.fixture(scope="module")
def told(features, tmp_path_factory):
    """A training of 25 steps, measured twice, with one step profiled: its folder, facts and bar."""
    folder = tmp_path_factory.mktemp("told") / "r"
    settings = drafter_settings(epochs=9.0, max_steps=25, validation={"share": 0.2, "times": 2})
    machine = config.TrainMachine(save_minutes=1e-9, profile_steps=[3, 4])
    with pytest.MonkeyPatch.context() as m:
        said = []
        m.setattr(progress._Lines, "write", lambda self, text: said.append(text))
        m.setattr(progress, "LINE_SECONDS", 0.0)
        _, facts = run(features, folder, settings, machine)
    return folder, facts, said


def test_lines_hold_the_figures(told):
    folder, facts, _ = told
    found = lines(folder)
    steps = [row for row in found if "loss" in row]
    assert [row["step"] for row in steps] == [10, 20, 25] and facts["history"] == steps
    measured = [row for row in found if "tau_mean" in row]
    assert [row["step"] for row in measured] == [12, 25] and facts["validations"] == measured
    assert all(set(row) == FIGURES for row in steps) and all(set(r) == MEASURED for r in measured)
    assert all(0 < row["supervised"] <= 1 and row["peak_memory_mb"] > 50 for row in steps)
    assert all(row["gradient_norm"] > 0 and row["tokens_per_second"] > 0 for row in steps)
    rates = [train.recipe.rate(s, 25, drafter_settings().training) for s in (9, 19, 24)]
    assert [row["lr"] for row in steps] == pytest.approx([3e-3 * rate for rate in rates])


def test_the_parts_of_the_time_are_less_than_the_whole(told):
    for row in lines(told[0]):
        if "seconds" in row:
            assert list(row["seconds"]) == list(monitor.PARTS)
            before = [] if row["step"] > 12 else ["validate"]  # not yet measured
            assert all(s > 0 for part, s in row["seconds"].items() if part not in before)
            assert sum(row["seconds"].values()) <= row["seconds_per_step"] * row["step"] * 1.001
    assert sum(told[1]["shares"].values()) <= 1.001


def test_tensorboard_reads_the_same_figures(told):
    folder, _, _ = told
    found = board(folder)
    for name in ("loss", "lr", "seconds/forward", "tau_mean"):
        first, *rest = name.split("/")
        expected = [
            (r["step"], r[first][rest[0]] if rest else r[first])
            for r in lines(folder)
            if first in r
        ]
        events = [(e.step, e.value) for e in found.Scalars(name)]
        assert [step for step, _ in events] == [step for step, _ in expected]
        assert [v for _, v in events] == pytest.approx([v for _, v in expected], rel=1e-6)
    assert "per_slot/1" in found.Tags()["scalars"]


def test_a_resumed_training_has_each_step_once(features, tmp_path, monkeypatch):
    """Lines after the last checkpoint are written anew, and TensorBoard forgets the old ones."""
    settings, original = drafter_settings(epochs=9.0, max_steps=30), train.Trainer._step

    def dying(trainer, plan, *args):
        if plan.step == 25:
            raise KeyboardInterrupt
        if plan.step == 15:
            trainer._save()
        return original(trainer, plan, *args)

    with monkeypatch.context() as m:
        m.setattr(train.Trainer, "_step", dying)
        with pytest.raises(KeyboardInterrupt):
            run(features, tmp_path / "r", settings)
    assert [row["step"] for row in lines(tmp_path / "r")] == [10, 20]
    assert [e.step for e in board(tmp_path / "r").Scalars("loss")] == [10, 20]
    run(features, tmp_path / "r", settings)
    assert [row["step"] for row in lines(tmp_path / "r")] == [10, 20, 30]
    assert [e.step for e in board(tmp_path / "r").Scalars("loss")] == [10, 20, 30]


def test_a_kill_loses_no_line(tmp_path):
    log = monitor.Log(tmp_path, [], 0, 30, True)
    log.line({"step": 10, "loss": 2.0})
    assert lines(tmp_path) == [{"step": 10, "loss": 2.0}]
    assert [e.value for e in board(tmp_path).Scalars("loss")] == [2.0]
    log.close()


def test_the_bar_says_how_far_how_well_and_how_fast(told):
    *_, last = [line for line in told[2] if "tau" in line]
    assert re.search(r"25/25 \[[\d:]+<[\d:]+, +[\d.]+ ?(steps/s|s/ steps), loss=[\d.]+, ", last), (
        last
    )
    assert re.search(r", accepted=[\d.]+, tau=[\d.]+, tok/s=[\d,]+, mem=[\d,]+MB\]$", last), last


def test_a_window_is_profiled(told):
    trace = json.loads((told[0] / "profile-3-4.json").read_text())
    names = [e.get("name", "") for e in trace["traceEvents"]]
    assert any("aten::" in name for name in names)
    assert sum("Optimizer.step" in name for name in names) == 2  # steps 3 and 4, no others


def test_an_error_inside_the_window_still_writes_it(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        with monitor.profiled(tmp_path, [0, 9], torch.device("cpu")) as begin_step:
            begin_step(0)
            torch.ones(2) + 1
            raise KeyboardInterrupt
    assert json.loads((tmp_path / "profile-0-9.json").read_text())["traceEvents"]


# --- warnings ---------------------------------------------------------------------------------------

GOOD = {"supervised": 0.9}


def test_waiting_for_data_is_warned_of():
    assert monitor.of_steps(GOOD, 0.09) == []
    (said,) = monitor.of_steps(GOOD, 0.11)
    assert "11% of the time is waiting" in said and "raise machine.train.loader_threads" in said


def test_the_first_wait_for_data_is_no_reason_to_warn(tmp_path, monkeypatch):
    """Nothing can be read ahead of the first step; later waits count by themselves."""
    seconds = iter([10.0, 20.0, 30.0])
    monkeypatch.setattr(monitor.Log, "seconds", property(lambda log: next(seconds)))
    log = monitor.Log(tmp_path, [], 0, 30, False)
    shares = [log.waited(data) for data in (9.0, 9.5, 14.5)]
    assert shares == pytest.approx([0.0, 0.05, 0.5])


def test_slots_that_teach_nothing_are_warned_of():
    assert monitor.of_steps({"supervised": 0.02}, 0.0) == []
    (said,) = monitor.of_steps({"supervised": 0.013}, 0.0)
    assert "only 1.3% of the drawn slots" in said and "chat template's end tokens" in said


@pytest.mark.parametrize(
    ("slots", "done", "said", "remedy"),
    [
        ([0.01, 0.0], 0.5, "nothing is accepted: slot 1 is right in 1.0%", "mask_token_id"),
        ([0.4, 0.01], 0.5, "no improvement over the first slot: slot 2", "training.loss.gamma (2)"),
        ([0.01, 0.0], 0.4, None, None),  # too early to say
        ([0.4, 0.01], 0.4, None, None),
        ([0.4, 0.1], 1.0, None, None),
        ([0.4], 1.0, None, None),  # blocks of two
        ([], 1.0, None, None),  # nothing was measured
    ],
)
def test_a_drafter_that_learns_nothing_is_warned_of(slots, done, said, remedy):
    found = monitor.of_validation({"per_slot": slots}, done, drafter_settings())
    assert len(found) == (said is not None)
    if said:
        assert found[0].startswith(said) and remedy in found[0]


def test_the_math_kernel_is_warned_of_by_a_training(features, tmp_path, capsys, monkeypatch):
    settings = drafter_settings(max_steps=1)
    run(features, tmp_path / "a", settings)
    assert "warning" not in capsys.readouterr().out
    monkeypatch.setattr(kernels, "warning", lambda *_: "warning: attention runs on the math kernel")
    run(features, tmp_path / "b", settings)
    assert "warning: attention runs on the math kernel" in capsys.readouterr().out


def test_each_warning_is_said_once(features, tmp_path, capsys, monkeypatch):
    """By a training, of which the same is wrong at every line."""
    monkeypatch.setattr(monitor, "of_steps", lambda row, waited: [f"data: {row['step']} of"])
    run(features, tmp_path / "r", drafter_settings(epochs=9.0, max_steps=30))
    assert re.findall("warning: .*", capsys.readouterr().out) == ["warning: data: 10 of"]
