"""The cost of a separate product for a block's own slots, and of giving all groups fixed shapes.

    python benchmarks/own_slots.py [--quick] [--json] [--device cpu|cuda]

Attention alone, forward and backward, of one layer (8:2 heads of 32, block 16; on a GPU 32:8 of 128 in
bfloat16), one document, one thread on a CPU, times without the kernels' self-check:

- `split`: as in training: rows that all slots of a group see without a mask; the band of the group's
  anchors and its own slots, R x R of which a block sees only its own, in a masked call.
- `own`: the own slots of all blocks as one batched product [N·K, G·B, B], merged with the calls over
  context by log-sum-exp; the masked call has the band alone.
- `rectangle`: as `own`, each group over all context rows with a mask: the only shapes that are the same
  for every step, whatever its anchors, as capturing the step as a CUDA graph would need.
- `staircase`: as `own`, with the ranges that anchors drawn evenly from one document keep to within
  four standard deviations. Wrong for anchors that do not (prompts, several documents), so not a choice;
  it says what fixed shapes cost at best.

Each figure is the median over rounds of a fresh process's median; systems take turns. All variants'
outputs and gradients are compared with those of `split` first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

VARIANTS = ("split", "own", "rectangle", "staircase")
SHAPES = ((2048, 256), (4096, 512), (8192, 512))
BLOCK = 16


class Problem:
    """Random queries, keys, values and gradient of one layer, and the groups of a variant."""

    def __init__(
        self,
        context: int,
        anchors: int,
        device: str,
        rows: int | None = None,
        heads: tuple[int, int, int] | None = None,  # query, key, width
    ):
        import torch

        from dflash import attention

        cuda = device == "cuda"
        heads, kv, d = heads or ((32, 8, 128) if cuda else (8, 2, 32))
        dtype = torch.bfloat16 if cuda else torch.float32
        g = torch.Generator().manual_seed(0)
        slots = (anchors, BLOCK)
        shapes = [(*slots, heads, d), *[(context, kv, d)] * 2, *[(*slots, kv, d)] * 2]
        made = [torch.randn(s, generator=g).to(device, dtype) for s in [*shapes, shapes[0]]]
        *self.tensors, self.grad_out = made
        self.anchors = torch.randperm(context - BLOCK, generator=g)[:anchors].sort().values
        self.context, self.device, self.dtype = context, torch.device(device), dtype
        limit = attention.group_bytes(device)
        self.rows = rows or attention.group_rows_within(
            limit, context, BLOCK, heads, kv, d, dtype.itemsize
        )

    def layout(self, variant: str):
        import torch

        from dflash.attention import Layout, Visibility

        layout = Layout(torch.tensor([0, self.context]), self.anchors, BLOCK, self.rows)
        groups, context = layout.groups(Visibility()), self.context
        if variant == "rectangle":
            groups[:] = [replace(g, low=0, high=context, clear_low=0, clear_high=0) for g in groups]
        if variant == "staircase":
            n, slack = len(groups), int(4 * context / (2 * len(self.anchors) ** 0.5))
            for i, g in enumerate(groups):
                low, high = context * i // n - slack, context * (i + 1) // n + slack
                low, high = max(0, low), min(context, high)
                if low > int(self.anchors[g.first]) or high < g.high:
                    raise ValueError("these anchors are not where the staircase expects them")
                groups[i] = replace(g, low=0, high=high, clear_low=0, clear_high=low)
        return layout

    def run(self, variant: str):
        """Output and gradients; layout and masks are made again, as in a step."""
        from dflash import attention
        from dflash.attention import Visibility

        layout, see = self.layout(variant), Visibility()
        if variant != "split":
            return separately(self.tensors, self.grad_out, layout, self.device, self.dtype)
        groups = layout.groups(see)
        parts = layout.parts(see, True, self.device, self.dtype)
        out, lses = attention._grouped_forward(*self.tensors, groups, parts)
        grads = attention._grouped_backward(self.grad_out, *self.tensors, out, lses, groups, parts)
        return out, *grads


def context_calls(layout, g, device, dtype) -> list[tuple[int, int, Any]]:
    """Ranges of context rows of a group's calls, with their masks as numbers.

    A row may be hidden whole: -1e30, since -inf would give a softmax of nothing.
    """
    import torch

    calls, rest = [], [(g.low, g.high)]
    if g.clear_high > g.clear_low:
        calls, rest = (
            [(g.clear_low, g.clear_high, None)],
            [(g.low, g.clear_low), (g.clear_high, g.high)],
        )
    anchor_C = layout.on_device(device).anchor_N[g.first : g.last]
    for low, high in rest:
        if low < high:
            seen_CL = torch.arange(low, high, device=device) < anchor_C[:, None]
            seen_RL = seen_CL.repeat_interleave(layout.block_size, 0)
            bias = torch.zeros(seen_RL.shape, dtype=dtype, device=device)
            calls.append((low, high, bias.masked_fill_(~seen_RL, -1e30)))
    return calls


def separately(tensors, grad_out, layout, device, dtype):
    """Attention with the own slots in a product of their own; output and gradients."""
    import torch

    from dflash import attention
    from dflash.attention import Visibility, fold, kernel_backward, kernel_forward, unfold

    q, k_S, v_S, k_N, v_N = tensors
    n, block, heads, d = q.shape
    kv = k_S.shape[1]
    g_heads, scale = heads // kv, d**-0.5
    wide = torch.promote_types(dtype, torch.float32)

    def by_block(x):  # [N·K, G·B, d]
        return x.view(n, block, kv, g_heads, d).permute(0, 2, 3, 1, 4).reshape(n * kv, -1, d)

    def of_group(x, g):  # [N, K, G, B, ...] -> [1, K, G·R, ...]
        part = x[g.first : g.last].transpose(0, 1).transpose(1, 2)
        return part.reshape(1, kv, -1, *x.shape[4:])

    keys, values = (x.permute(0, 2, 1, 3).reshape(n * kv, block, d) for x in (k_N, v_N))
    scores = (torch.bmm(by_block(q), keys.transpose(1, 2)) * scale).to(wide)
    own_lse = scores.logsumexp(-1)
    own = torch.bmm((scores - own_lse[..., None]).exp().to(dtype), values)
    own, own_lse = own.view(n, kv, g_heads, block, d), own_lse.view(n, kv, g_heads, block)
    groups = layout.groups(Visibility())
    out, lse_all = torch.empty_like(q), torch.empty_like(own_lse)
    calls = [context_calls(layout, g, device, dtype) for g in groups]
    for g, of_g in zip(groups, calls, strict=True):
        rows = fold(q[g.first : g.last], kv)
        o, lse = of_group(own, g), of_group(own_lse, g)
        for low, high, bias in of_g:
            k, v = (x[low:high].transpose(0, 1)[None] for x in (k_S, v_S))
            o, lse = attention._merged(o, lse, *kernel_forward(rows, k, v, bias))
        out[g.first : g.last] = unfold(o, q.shape)
        lse_all[g.first : g.last] = lse.view(kv, g_heads, -1, block).permute(2, 0, 1, 3)

    grad_rows, out_rows = by_block(grad_out), by_block(out)
    scores = (torch.bmm(by_block(q), keys.transpose(1, 2)) * scale).to(wide)
    p = (scores - lse_all.view(n * kv, -1, 1)).exp()
    delta = (grad_rows.to(wide) * out_rows.to(wide)).sum(-1, keepdim=True)
    ds = ((torch.bmm(grad_rows, values.transpose(1, 2)).to(wide) - delta) * p * scale).to(dtype)
    dv_N = torch.bmm(p.to(dtype).transpose(1, 2), grad_rows)
    dk_N = torch.bmm(ds.transpose(1, 2), by_block(q))
    own_dq = torch.bmm(ds, keys).view(n, kv, g_heads, block, d)
    dq = torch.empty_like(q)
    dk_S, dv_S = (torch.zeros_like(x, dtype=wide) for x in (k_S, v_S))
    for g, of_g in zip(groups, calls, strict=True):
        blocks = slice(g.first, g.last)
        rows, slope, o = (fold(x[blocks], kv) for x in (q, grad_out, out))
        total, lse = of_group(own_dq, g), of_group(lse_all, g)
        for low, high, bias in of_g:
            k, v = (x[low:high].transpose(0, 1)[None] for x in (k_S, v_S))
            dq_part, dk, dv = kernel_backward(slope, rows, k, v, bias, o, lse)
            total = total + dq_part
            dk_S[low:high] += dk[0].transpose(0, 1)
            dv_S[low:high] += dv[0].transpose(0, 1)
        dq[blocks] = unfold(total, q.shape)
    dk_N, dv_N = (x.view(n, kv, block, d).permute(0, 2, 1, 3) for x in (dk_N, dv_N))
    return out, dq, dk_S.to(dtype), dv_S.to(dtype), dk_N, dv_N


def difference(problem: Problem, variant: str) -> float:
    """The worst relative difference of a variant's results to those of `split`."""
    pairs = zip(problem.run("split"), problem.run(variant), strict=True)
    return max(float((a.float() - b.float()).norm() / a.float().norm()) for a, b in pairs)


def seconds(problem: Problem, variant: str, runs: int) -> float:
    """The median of some runs, after one to warm up."""
    import torch

    cuda, spent = problem.device.type == "cuda", []
    for run in range(runs + 1):
        if cuda:
            torch.cuda.synchronize()
        begun = time.perf_counter()
        problem.run(variant)
        if cuda:
            torch.cuda.synchronize()
        if run:
            spent.append(time.perf_counter() - begun)
    return statistics.median(spent)


def child(job: dict[str, Any]) -> dict[str, Any]:
    import torch

    if job["device"] == "cpu":
        torch.set_num_threads(1)
    problem = Problem(*job["shape"], job["device"])
    off = difference(problem, job["variant"])
    limit = 3e-2 if job["device"] == "cuda" else 1e-5
    if not off <= limit:
        raise SystemExit(f"{job['variant']} differs from split by {off:.1e}")
    return {"seconds": seconds(problem, job["variant"], job["runs"]), "rows": problem.rows}


def measure(shape, variant: str, device: str, runs: int) -> dict[str, Any]:
    job = {"shape": shape, "variant": variant, "device": device, "runs": runs}
    command = [sys.executable, __file__, "--job", json.dumps(job)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{variant} at {shape}: {done.stderr.strip()[-400:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the smallest shape, within a minute")
    parser.add_argument("--json", action="store_true", help="a line a case, as JSON")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        print(json.dumps(child(json.loads(args.job))))
        return 0
    rounds, runs = (2, 3) if args.quick else (5, 5)
    if not args.json:
        heads = "".join(f"{v:>20}" for v in VARIANTS)
        print(f"{'context x anchors':<19}{'rows':>6}{heads}   ms, and x split")
    for shape in SHAPES[:1] if args.quick else SHAPES:
        found: dict[str, list[float]] = {v: [] for v in VARIANTS}
        rows = 0
        for turn in range(rounds):
            for variant in VARIANTS if turn % 2 == 0 else VARIANTS[::-1]:
                one = measure(shape, variant, args.device, runs)
                found[variant].append(one["seconds"])
                rows = one["rows"]
        spent = {v: statistics.median(x) for v, x in found.items()}
        name = f"{shape[0]}x{shape[1]}"
        if args.json:
            print(json.dumps({"case": name, "rows": rows, "seconds": spent}), flush=True)
            continue
        cells = [f"{1000 * s:12.1f} {s / spent['split']:7.3f}" for s in spent.values()]
        print(f"{name:<19}{rows:>6}{''.join(cells)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
