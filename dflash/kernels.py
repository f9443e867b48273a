"""Which attention kernel a device really gives, asked before training and not guessed.

A fused kernel refuses silently: `scaled_dot_product_attention` then falls back to the math one, which
writes the whole score matrix. This tells, for a device, a dtype, a head width and grouped heads,
which kernel each backend of `dflash.attention` gets:

    python -m dflash.kernels [--heads 32 --kv-heads 8 --head-dim 128]

With `--check` it also takes steps of a small drafter with such heads: their gradients against the
CPU's, their time and memory, under a minute on a GPU; the status is 1 if a gradient is off.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend

from dflash import attention, gradient_check
from dflash.errors import UserError, entrypoint


class Kernel(NamedTuple):
    """One call and what it gets."""

    backend: str  # of dflash.attention, or "sdpa" for a bare call with grouped heads
    call: str  # "masked" or "no mask"
    kernel: str  # "math" is the slow one that holds all scores
    fault: str | None  # why a fused kernel was refused, if one was tried

    @property
    def slow(self) -> bool:
        """Whether all scores of a call are held and written out."""
        return self.kernel.startswith("math")


def grouped_kernels(
    backend: str, device: torch.device, dtype: torch.dtype, head_dim: int
) -> list[Kernel]:
    """The kernels behind `chunked` (masked calls) and `split` (both kinds); folded heads."""
    out = []
    for masked in (True, False) if backend == "split" else (True,):
        q = torch.empty(1, 1, 1, head_dim, device=device, dtype=dtype)
        bias = torch.zeros(1, 1, device=device, dtype=dtype) if masked else None
        kernel = attention.fused_kernel(q, bias)
        refused = []
        for wanted in attention.candidates(device.type, dtype, head_dim, masked):
            if fault := attention.kernel_fault(wanted, device, dtype, head_dim, masked):
                refused.append(f"{wanted}: {fault}")
        call = "masked" if masked else "no mask"
        out.append(Kernel(backend, call, kernel, "; ".join(refused) or None))
    return out


def sdpa_kernel(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, masked: bool
) -> str:
    """Which kernel `scaled_dot_product_attention` chooses by itself, named as torch names it."""
    q = torch.empty(1, heads, 64, head_dim, device=device, dtype=dtype, requires_grad=True)
    k = torch.empty(1, kv_heads, 64, head_dim, device=device, dtype=dtype, requires_grad=True)
    mask = torch.ones(1, 1, 64, 64, device=device, dtype=torch.bool) if masked else None
    choice = torch._fused_sdp_choice(
        q, k, k, attn_mask=mask, dropout_p=0.0, is_causal=False, enable_gqa=heads != kv_heads
    )
    return SDPBackend(choice).name.lower().removesuffix("_attention")


def of_backend(
    backend: str,
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
) -> list[Kernel]:
    """The kernels that training with a backend uses."""
    if backend in ("chunked", "split"):
        return grouped_kernels(backend, device, dtype, head_dim)
    if backend == "gather":  # its heads are folded
        name = sdpa_kernel(device, dtype, kv_heads, kv_heads, head_dim, True)
        return [Kernel(backend, "masked", name, None)]
    if backend == "flex":
        name = "flex compiled" if device.type == "cuda" else "none (no backward pass here)"
        return [Kernel(backend, "masked", name, None)]
    return [Kernel(backend, "masked", "math, written out", None)]


def warning(found: list[Kernel], backend: str) -> str | None:
    """What to tell someone whose attention runs on the math kernel, or None."""
    slow = [k for k in found if k.slow]
    if not slow or backend == "dense":
        return None
    why = f" ({slow[0].fault})" if slow[0].fault else ""
    return (
        f"warning: attention runs on the math kernel here{why}: slow, and it holds all scores of a "
        "group. Remedy: training.dtype bfloat16 on a GPU, a head_dim that is a multiple of 8 and at "
        "most 256, or a torch build with fused kernels; machine.train.group_rows keeps it small"
    )


def table(
    device: torch.device, heads: int, kv_heads: int, head_dim: int
) -> Iterator[tuple[str, Kernel]]:
    """Every dtype with every backend, and a bare call with grouped heads for comparison."""
    for name in ("bfloat16", "float32", "float64"):
        dtype = getattr(torch, name)
        for backend in attention.BACKENDS:
            for kernel in of_backend(backend, device, dtype, heads, kv_heads, head_dim):
                yield name, kernel
        for masked in (True, False):
            found = sdpa_kernel(device, dtype, heads, kv_heads, head_dim, masked)
            call = "masked" if masked else "no mask"
            yield name, Kernel("sdpa, grouped heads", call, found, None)


def check(device: torch.device, shape: gradient_check.Shape, tokens: int) -> bool:
    """Print gradients of a small drafter, and time and memory of a step over two packs of so many
    tokens; whether all gradients are right."""
    print("\ngradients of a step against the CPU's (relative difference of the worst tensor)")
    want, fine = gradient_check.reference(shape), True
    for backend in ("split", "chunked"):
        for mode in gradient_check.MODES:
            for dtype in gradient_check.LIMITS:
                try:
                    row = gradient_check.compare(shape, device, backend, mode, dtype, want)
                    said = f"{row['worst']:.1e} {'ok' if row['ok'] else 'WRONG'} ({row['at']})"
                    fine = fine and row["ok"]
                except Exception as e:  # whatever a device does; the others are still worth knowing
                    said, fine = f"failed: {type(e).__name__}: {e}".splitlines()[0], False
                print(f"{dtype:<10}{backend:<9}{mode:<11}{said}", flush=True)
    packs, anchors = ((tokens,), (tokens,)), tokens // 16
    large = replace(shape, hidden=1024, vocab=8000, lengths=packs, anchors=anchors)
    print(
        f"\na step of two packs of {tokens:,} tokens, {anchors} blocks each, bfloat16, "
        f"{large.layers} layers of width {large.hidden:,}"
    )
    for mode in gradient_check.MODES:
        row = gradient_check.timed(large, device, mode, "bfloat16")
        peak = "" if row["peak"] is None else f"  {row['peak'] / 2**20:,.0f} MiB above what stays"
        print(f"split    {mode:<11}{1000 * row['seconds']:8.1f} ms{peak}", flush=True)
    return fine


def main(argv: list[str] | None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m dflash.kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,  # commands keep their lines
    )
    parser.add_argument("--heads", type=int, default=32, help="query heads")
    parser.add_argument("--kv-heads", type=int, default=8, help="key/value heads")
    parser.add_argument("--head-dim", type=int, default=128, help="width of a head")
    parser.add_argument("--check", action="store_true", help="take steps and check their gradients")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    args = parser.parse_args(argv)
    if args.heads < 1 or args.kv_heads < 1 or args.heads % args.kv_heads:
        raise UserError(f"--heads {args.heads} does not divide among --kv-heads {args.kv_heads}")
    if args.head_dim < 1:
        raise UserError(f"--head-dim: found {args.head_dim}; allowed: 1 or more")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no CUDA device here; leave --device out")
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(
        f"{name}, torch {torch.__version__}, heads {args.heads}:{args.kv_heads} of {args.head_dim}"
    )
    print(f"{'dtype':<10}{'backend':<22}{'call':<10}kernel")
    for dtype, k in table(device, args.heads, args.kv_heads, args.head_dim):
        note = f"  [{k.fault}]" if k.fault else ""
        print(f"{dtype:<10}{k.backend:<22}{k.call:<10}{k.kernel}{note}")
    shape = gradient_check.like(args.heads, args.kv_heads, args.head_dim)
    if args.check and not check(device, shape, 2048 if device.type == "cuda" else 256):
        raise SystemExit(1)


if __name__ == "__main__":
    entrypoint(main)
