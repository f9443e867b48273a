"""The tests of tests/cuda on the emulated CUDA device, which a process has from its start."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.cuda import device

HERE = Path(__file__).parent


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ compiles the emulated device")
def test_on_the_emulated_device():
    command = [sys.executable, "-m", "pytest", str(HERE / "cuda"), "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "--durations=10"],
        env=device.environment(DFLASH_GPUS="2", OMP_NUM_THREADS="1"),
        cwd=HERE.parent,
        capture_output=True,
        text=True,
    )
    print(done.stdout[-3000:])
    assert done.returncode == 0, done.stdout[-30000:] + done.stderr[-5000:]
    assert " passed" in done.stdout and " skipped" not in done.stdout
