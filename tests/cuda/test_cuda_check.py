"""The check of a machine's gradients: once, before training, and a refusal where one is off."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dflash import attention, gradient_check
from dflash import kernels as command
from dflash.errors import UserError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def forgotten(cache):
    """No check has been noted."""
    shutil.rmtree(cache / "dflash", ignore_errors=True)
    return cache / "dflash"


def test_training_checks_once(trainer, forgotten, capsys):
    trainer({"max_steps": 1}).run()
    assert "kernels: gradients of split selective within" in capsys.readouterr().out
    (note,) = forgotten.glob("gradients-*.json")
    known = json.loads(note.read_text())
    assert known["row"]["ok"] and known["card"] == "Emulated H100" and known["torch"]
    trainer({"max_steps": 1}, folder="again").run()
    assert "as checked before on this machine" in capsys.readouterr().out
    trainer({"max_steps": 1, "dtype": "float32"}, folder="other").run()
    assert "as checked before" not in capsys.readouterr().out
    assert len(list(forgotten.glob("*"))) == 2


def test_a_cache_that_cannot_be_written_is_no_error(trainer, monkeypatch, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    trainer({"max_steps": 1}).run()
    assert "kernels: gradients of split selective within" in capsys.readouterr().out


def break_kernels(monkeypatch):
    """The efficient kernel's backward pass gets `out` as finding 1 had it, unseen by the self-check."""
    real = attention.kernel_backward

    def wrong(slope, q, k, v, bias, out, lse):
        if attention.fused_kernel(q, bias) != "efficient":
            return real(slope, q, k, v, bias, out, lse)
        return tuple(1.2 * g for g in real(slope, q, k, v, bias, out, lse))

    monkeypatch.setattr(attention, "kernel_fault", lambda *args: None)
    monkeypatch.setattr(attention, "kernel_backward", wrong)


def test_training_refuses_a_machine_whose_gradients_are_off(trainer, forgotten, monkeypatch):
    break_kernels(monkeypatch)
    with pytest.raises(
        UserError, match="Emulated H100, torch .*training here would learn something"
    ):
        trainer({"max_steps": 1})
    assert not forgotten.exists()


def test_the_command_says_so_too(gpu, monkeypatch, capsys):
    shape, timed = gradient_check.like(4, 2, 64, 4), gradient_check.timed

    def small(shape, *args):
        return timed(replace(shape, hidden=64, vocab=100), *args)

    monkeypatch.setattr(gradient_check, "timed", small)
    assert command.check(gpu, shape, 128)
    said = capsys.readouterr().out
    assert said.count(" ok (") == 12 and "WRONG" not in said and "MiB above what stays" in said
    break_kernels(monkeypatch)
    assert not command.check(gpu, shape, 128)
    assert "WRONG" in capsys.readouterr().out


def test_the_command_as_it_is_typed(gpu, capsys):
    command.main(["--heads", "4", "--kv-heads", "2", "--head-dim", "16"])
    said = capsys.readouterr().out
    assert said.startswith("Emulated H100, torch ")
    assert "bfloat16  split                 masked    efficient" in said
    assert "bfloat16  split                 no mask   flash" in said


def test_gradients_by_the_slow_way_are_the_same_on_both(gpu):
    """What the check compares with does not depend on the device."""
    shape = gradient_check.like(4, 2, 64, 4)
    want = gradient_check.reference(shape)
    row = gradient_check.compare(shape, gpu, "dense", "none", "float32", want)
    assert row["ok"] and row["worst"] < 1e-4


def gpu_check(out: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = ["sh", str(ROOT / "benchmarks/gpu_check.sh"), "--toy", "--out", str(out), *args]
    return subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHON": sys.executable}
    )


def test_gpu_check_runs_to_its_end(tmp_path):
    """Every case at toy size, as a card would run them, and a file with all rows."""
    out = tmp_path / "gpu.json"
    done = gpu_check(out, "--in-process")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["card"] == "Emulated H100" and found["device"] == "cuda"
    assert not any({"failed", "skipped"} & set(c) for c in found["cases"])
    names = [c["case"] for c in found["cases"]]
    for part in ("gradients", "split selective", "rows=256", "loop", "decode", "decode cudnn"):
        assert any(part in name for name in names), (part, names)
    for part in ("loss", "own-slots", "prefill", "dense", "gather"):
        assert any(part in name for name in names), (part, names)
    (first, *_) = found["cases"]
    assert len(first["gradients"]) == 22 and all(r["ok"] for r in first["gradients"])
    steps = [c for c in found["cases"] if "step_seconds" in c and "kernel" in c]
    assert len(steps) >= 8 and all(c["peak_gib"] >= 0 for c in steps)


def test_a_case_that_fails_fails_the_command_and_the_others_go_on(tmp_path):
    """flex, which cannot compile for this device, in a process of its own."""
    out = tmp_path / "gpu.json"
    done = gpu_check(out, "--only", "flex", "loss")
    assert done.returncode == 1, done.stdout + done.stderr
    rows = {c["case"]: c for c in json.loads(out.read_text())["cases"]}
    assert "flex does not compile here" in rows["256x16 flex layer"]["failed"]
    assert "products alone" in rows["256x16 loss"]["text"]
