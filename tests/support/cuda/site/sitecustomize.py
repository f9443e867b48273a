"""Puts the emulated CUDA device into a Python process that is started with it (see device.py), as soon
as something imports torch."""

import importlib.abc
import importlib.util
import os
import sys
from pathlib import Path


class Torch(importlib.abc.MetaPathFinder):
    """Finds torch as others do, loads the device before it and patches `torch.cuda` after it."""

    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
        from support.cuda import device

        device.load()
        spec = importlib.util.find_spec("torch")
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            device.patch(module)

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("DFLASH_EMULATED_CUDA"):
    sys.meta_path.insert(0, Torch())
