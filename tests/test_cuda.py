"""The tests of tests/cuda on the emulated CUDA device, in a process a file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.cuda import device

HERE = Path(__file__).parent


@pytest.mark.parametrize("name", sorted(p.name for p in (HERE / "cuda").glob("test_*.py")))
def test_on_the_emulated_device(name):
    command = [sys.executable, "-m", "pytest", str(HERE / "cuda" / name), "-p", "no:cacheprovider"]
    done = subprocess.run(
        command,
        env=device.environment(DFLASH_GPUS="2", OMP_NUM_THREADS="1"),
        cwd=HERE.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-5000:]
