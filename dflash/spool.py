"""Hidden states on their way from vLLM's processes to the stage: a file a document, read once.

Imported on both sides, so it needs torch and numpy only. A file is one line of JSON (`sample_id`,
`ids_sha256` of the tokens as int32, `dtype`, `shape`), then the states in C order. It appears whole,
by a rename; nothing is flushed to disk, since no spool outlives its run.

Legend: S tokens · L layers · H hidden width.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


def place(spool: Path, index: int) -> Path:
    """Where the states of the document with that number are put."""
    return spool / f"{index:08d}.states"


def ids_sha256(ids: Sequence[int] | np.ndarray) -> str:
    """One name for a document's tokens."""
    return hashlib.sha256(np.asarray(ids, "<i4").tobytes()).hexdigest()


def put(path: Path, sample_id: str, ids: Sequence[int] | np.ndarray, states_SLH: Tensor) -> None:
    """Write the states of one document, of whatever float type they were computed in."""
    header = {
        "sample_id": sample_id,
        "ids_sha256": ids_sha256(ids),
        "dtype": str(states_SLH.dtype).removeprefix("torch."),
        "shape": list(states_SLH.shape),
    }
    temporary = path.with_suffix(".partial")
    with open(temporary, "wb") as f:
        f.write(json.dumps(header).encode() + b"\n")
        f.write(states_SLH.contiguous().view(torch.uint8).numpy())
    os.rename(temporary, path)


def take(
    path: Path, sample_id: str, ids: Sequence[int] | np.ndarray, layers: int, hidden: int
) -> Tensor:
    """The states [S, L, H] that `put` wrote, checked to be those of this document.

    Raises ValueError that says in what they differ.
    """
    with open(path, "rb") as f:
        header = json.loads(f.readline())
        data = bytearray(f.read())
    expected = {
        "sample_id": sample_id,
        "ids_sha256": ids_sha256(ids),
        "shape": [len(ids), layers, hidden],
    }
    for key, value in expected.items():
        if header[key] != value:
            raise ValueError(f"{key} {header[key]}, expected {value}")
    dtype = getattr(torch, header["dtype"])
    if len(data) != math.prod(header["shape"]) * dtype.itemsize:
        raise ValueError(f"{len(data)} bytes, expected {header['shape']} of {header['dtype']}")
    return torch.frombuffer(data, dtype=dtype).view(header["shape"])
