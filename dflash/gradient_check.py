"""Does this machine train what it should? Gradients of a small drafter on its kernels against the CPU's.

A step of training as it is, from packs in pinned memory to summed gradients, on the device, against
the slow, obvious backend (`dense`, no checkpointing, float32) on the CPU. Training on a GPU asks this
once a machine, and refuses to train where a gradient is off; `python -m dflash.kernels --check` and
`benchmarks/gpu_check.sh` show it.

Imports torch and numpy only, so that it runs where nothing else of the project is installed.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dflash import attention, drafter, gradient, loss
from dflash.drafter import Drafter, DrafterConfig
from dflash.errors import UserError
from dflash.files import sha256, text_sha256, write_json

if TYPE_CHECKING:
    from dflash import config

# Relative difference of a tensor's gradient, in the norm. Right kernels stay at a third of it and below.
LIMITS = {"float32": 1e-3, "bfloat16": 4e-2}
MODES = ("none", "layer", "selective")


@dataclass(frozen=True)
class Shape:
    """A drafter and its packs; heads are what kernels depend on."""

    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 128
    hidden: int = 256
    layers: int = 2
    vocab: int = 500
    block: int = 16
    window: int | None = 100  # of the last layer
    lengths: tuple[tuple[int, ...], ...] = ((300, 200), (250,))  # of documents, pack by pack
    anchors: int = 12  # of a document
    taps: int = 2

    @property
    def config(self) -> DrafterConfig:
        sliding = "sliding_attention" if self.window else "full_attention"
        return DrafterConfig(
            hidden_size=self.hidden,
            intermediate_size=3 * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            rms_norm_eps=1e-6,
            rope_theta=1e6,
            max_position_embeddings=40960,
            vocab_size=self.vocab,
            block_size=self.block,
            mask_token_id=self.vocab - 1,
            target_layer_ids=tuple(range(self.taps)),
            num_target_layers=self.taps + 2,
            layer_types=("full_attention",) * (self.layers - 1) + (sliding,),
            sliding_window=self.window,
        )


def like(heads: int, kv_heads: int, head_dim: int, block: int = 16) -> Shape:
    """A shape with these heads and blocks, and a window that some of its blocks do not see beyond."""
    return Shape(heads, kv_heads, head_dim, block=block, window=max(100, 4 * block))


class Step:
    """A step of training over random documents, on a device."""

    def __init__(
        self,
        shape: Shape,
        device: torch.device,
        backend: str,
        checkpointing: str,
        dtype: str,
        group_rows: int | None = None,
    ):
        kind = SimpleNamespace(labels="data", weights="decay", gamma=4.0, dpace_alpha=0.5)
        self.training = SimpleNamespace(dtype=dtype, loss=kind)
        self.machine = SimpleNamespace(
            attention=backend,
            checkpointing=checkpointing,
            reentrant=False,
            loss_rows=None,
            group_rows=group_rows,
            group_mb=None,
            pad_context=None,
            pad_blocks=None,
        )
        self.shape, self.device, self.dtype = shape, device, drafter.DTYPES[dtype]
        with torch.device("meta"):  # made on the CPU, where the numbers do not depend on the device
            self.drafter = Drafter(shape.config)
        self.drafter.to_empty(device="cpu").init_weights(0)
        self.drafter.to(device)
        g = torch.Generator().manual_seed(1)
        table, head = (torch.randn(shape.vocab, shape.hidden, generator=g) for _ in "eh")
        head = head / shape.hidden**0.5
        self.head = gradient.Head(table.to(device), head.to(device), self.dtype)
        self.documents = [[self._document(g, n) for n in pack] for pack in shape.lengths]
        self.weights_B = loss.slot_weights(shape.block, 4.0)

    def _document(self, g: torch.Generator, length: int) -> tuple[SimpleNamespace, np.ndarray]:
        states = torch.randn(length, self.shape.taps, self.shape.hidden, generator=g).bfloat16()
        ids = torch.randint(self.shape.vocab - 1, (length,), generator=g).int().numpy()
        mask = np.arange(length) >= 3
        bits = states.view(torch.uint16).numpy()
        of = SimpleNamespace(
            sample_id="", input_ids=ids, loss_mask=mask, hidden=bits, last_hidden=None
        )
        chosen = torch.randperm(length - 4, generator=g)[: self.shape.anchors].sort().values + 3
        return of, chosen.numpy()

    def packs(self) -> Iterable[Any]:
        """The packs, made again each time, as the loader makes them."""
        for pack in self.documents:
            documents, anchors = (list(x) for x in zip(*pack, strict=True))
            yield gradient.make_pack(
                documents,
                anchors,
                self.weights_B,
                self.drafter,
                self.machine,
                self.dtype,
                self.head,
            )

    def run(self, packs: Iterable[Any] | None = None) -> gradient.Counted:
        """Add the gradients of the packs, divided by their weight mass."""
        packs = list(self.packs()) if packs is None else packs
        mass = sum(p.mass for p in packs)
        return gradient.accumulate(
            *(self.drafter, packs, mass, self.head, self.training, self.machine),
            lambda part: nullcontext(),
        )

    def gradients(self) -> dict[str, torch.Tensor]:
        self.run()
        return {n: p.grad.detach().cpu().double() for n, p in self.drafter.named_parameters()}


def reference(shape: Shape) -> dict[str, torch.Tensor]:
    """The gradients by the slow way on the CPU."""
    return Step(shape, torch.device("cpu"), "dense", "none", "float32").gradients()


def compare(
    shape: Shape,
    device: torch.device,
    backend: str,
    checkpointing: str,
    dtype: str,
    want: dict[str, torch.Tensor],
) -> dict[str, Any]:
    """The worst tensor's gradient: `worst` (relative difference), `at` (its name), `ok`."""
    found = Step(shape, device, backend, checkpointing, dtype, 4 * shape.block).gradients()
    off = {n: float((found[n] - w).norm() / w.norm()) for n, w in want.items()}
    at = max(off, key=lambda n: off[n] if off[n] == off[n] else float("inf"))
    row = {"backend": backend, "checkpointing": checkpointing, "dtype": dtype}
    return row | {"worst": float(f"{off[at]:.3g}"), "at": at, "ok": off[at] <= LIMITS[dtype]}


def timed(shape: Shape, device: torch.device, checkpointing: str, dtype: str) -> dict[str, Any]:
    """Seconds of a step, median of five, and its peak memory in bytes above what stays (GPUs)."""
    step = Step(shape, device, "split", checkpointing, dtype)
    cuda, seconds, peak = device.type == "cuda", [], None
    for turn in range(7):
        step.drafter.zero_grad(set_to_none=True)
        packs = list(step.packs())
        if cuda:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
        begun = time.perf_counter()
        step.run(packs)
        if cuda:
            torch.cuda.synchronize(device)
            peak = torch.cuda.max_memory_allocated(device) - before
        if turn >= 2:
            seconds.append(time.perf_counter() - begun)
    return {"checkpointing": checkpointing, "seconds": statistics.median(seconds), "peak": peak}


# --- once a machine -------------------------------------------------------------------------------


def facts(
    device: torch.device, shape: Shape, backend: str, mode: str, dtype: str
) -> dict[str, Any]:
    """What a check holds for: another of any of these is checked again."""
    code = sha256(*(Path(m.__file__) for m in (attention, drafter, loss, gradient)))
    return {
        "card": torch.cuda.get_device_name(device),
        "host": platform.node(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "backend": backend,
        "checkpointing": mode,
        "dtype": dtype,
        "shape": asdict(shape),
        "code": code,
    }


def cache_folder() -> Path:
    """Where checks that passed are noted."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "dflash"


def require(
    device: torch.device,
    c: DrafterConfig,
    training: config.Training,
    machine: config.TrainMachine,
) -> str:
    """Check this machine's gradients for such a drafter, unless that has been done. Returns what was
    found, for the log. Raises UserError when a gradient is off."""
    shape = like(c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.block_size)
    known = facts(device, shape, machine.attention, machine.checkpointing, training.dtype)
    path = cache_folder() / f"gradients-{text_sha256(json.dumps(known, sort_keys=True))[:16]}.json"
    with suppress(OSError, ValueError):
        row = json.loads(path.read_text())["row"]
        return f"{_said(row)}, as checked before on this machine"
    row = compare(
        *(shape, device, machine.attention, machine.checkpointing, training.dtype), reference(shape)
    )
    if not row["ok"]:
        raise UserError(
            f"{known['card']}, torch {known['torch']}: {_said(row)}, while rounding explains "
            f"{LIMITS[training.dtype]:g}: training here would learn something else; run `python -m "
            "dflash.kernels --check`, and use another version of torch, or training.dtype float32"
        )
    with suppress(OSError, UserError):  # a home that cannot be written: checked again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {**known, "row": row})
    return _said(row)


def _said(row: dict[str, Any]) -> str:
    return f"gradients of {row['backend']} {row['checkpointing']} within {row['worst']:.1e} of the CPU's"
