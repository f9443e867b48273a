"""Puts the emulated CUDA device into a Python process that is started with it (see device.py)."""

import os
import sys
from pathlib import Path

if os.environ.get("DFLASH_EMULATED_CUDA"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    from support.cuda import device

    device.load()
