"""Records which collectives a process takes part in, in their order."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Collectives(TorchDispatchMode):
    """Writes a line for each collective operator that is called while it is active: its name, and numbers,
    type and kind of device of its first tensor. A line is there as soon as the operator is called, so a
    process that is killed in it has told."""

    def __init__(self, path: Path):
        super().__init__()
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__:
            tensor = next(self._tensors(args))
            about = f"{tensor.numel()} {tensor.dtype} {tensor.device.type}"
            os.write(self.file, f"{func._schema.name.split('::')[1]} {about}\n".encode())
        return func(*args, **(kwargs or {}))

    def _tensors(self, args: Any):
        for a in args:
            if isinstance(a, torch.Tensor):
                yield a
            elif isinstance(a, list | tuple):
                yield from self._tensors(a)


def read(path: Path) -> list[str]:
    """What a process has recorded."""
    return path.read_text().splitlines()
