"""Our training step on a CUDA card at Qwen3-8B geometry: time, memory, kernels and gradients.

    benchmarks/gpu_check.sh [--out FILE] [--only WORD ...] [--budget SECONDS]

The drafter of Qwen3-8B (width 4096, 5 layers, 32:8 heads of 128, block 16, 5 taps, vocabulary 151,936;
1.05 B weights), bf16 autocast over float32 weights with their AdamW state, one document of 8,192 tokens
with 512 anchors and one of 8,000 with 1,024. For each backend and checkpoint mode:

- `step`: forward, backward and optimiser, median of 5 after 2 to warm up (CUDA events). A new layout
  is made in every step, as training does; `reused` is the step with one layout kept, so what it costs
  on the host shows; `optim` is the optimiser's part.
- `peak`: torch.cuda.max_memory_allocated over those steps; `resident` is what lies there between them
  (weights, optimiser state, embedding, head, features).
- `kernel`: attention operators and CUDA kernels that torch.profiler saw in one more step.

Before them, the gradients of every backend and checkpoint mode against `dense` in float64, on a small
drafter with two documents and a sliding layer. Limits are 1e-3 in float32, 4e-2 under bf16 autocast.

Every case has a process and a time limit of its own: what runs out of memory, hangs or crashes is
recorded as that, and the others go on. Cases stand in order of importance, and those that do not fit the
whole budget (default 440 s) are recorded as skipped. The JSON is written anew after each case.
Without CUDA the same code runs at toy size, so that it is known to work; times then mean nothing.
Needs torch and safetensors only, no network, and nothing installed of this project.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package need not be installed

from training_step import ROOT, step_flops, visible_pairs  # noqa: E402

GIB = 2**30


@dataclass(frozen=True)
class Geometry:
    """Shape of a drafter; names as in `step_flops`."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    taps: int = 5
    block: int = 16


QWEN3_8B = Geometry(4096, 12288, 5, 32, 8, 128, 151936)
TOY = Geometry(64, 192, 2, 4, 2, 16, 500)
SMALL = Geometry(256, 512, 2, 8, 2, 128, 500)  # gradients; heads as wide as the real ones


@dataclass(frozen=True)
class Case:
    """One row of the table. `backend` is "gradients" or "gradients-flex" for the small check."""

    backend: str
    context: int = 0
    anchors: int = 0
    checkpointing: str = "none"
    group_rows: int | None = None  # None: what fits the package's memory target
    limit: float = 60.0  # seconds for the whole process

    @property
    def name(self) -> str:
        if not self.context:
            return self.backend
        rows = f" rows={self.group_rows}" if self.group_rows else ""
        return f"{self.context}x{self.anchors} {self.backend} {self.checkpointing}{rows}"


def cuda_cases() -> list[Case]:
    """What runs on a card, the most important first. Compiling flex takes longer."""
    small, large = (8192, 512), (8000, 1024)
    out = [Case("gradients", limit=90)]
    for shape in (small, large):
        out += [Case(b, *shape, "layer") for b in ("split", "chunked")]
        out += [Case("flex", *shape, "layer", limit=110)]
        out += [Case("gather", *shape, "group")] if shape == large else []
        out += [Case(b, *shape) for b in ("split", "chunked")]
    out += [Case("flex", *small, limit=110), Case("gradients-flex", limit=110)]
    out += [Case("dense", *small, "layer"), Case("gather", *small, "group")]
    out += [Case("flex", *large, limit=110), Case("dense", *large, "layer"), Case("gather", *large)]
    return out + [Case("split", *large, "layer", group_rows=r) for r in (512, 2048)]


def toy_cases() -> list[Case]:
    """The same code at toy size."""
    out = [Case("gradients"), Case("chunked", 256, 16), Case("split", 256, 16, "layer")]
    out += [Case("gather", 256, 16, "group"), Case("dense", 256, 16, "layer")]
    return [*out, Case("flex", 256, 16, group_rows=64)]


def make_config(g: Geometry, layer_types: tuple[str, ...], window: int | None):
    """The drafter's configuration."""
    from dflash.drafter import DrafterConfig

    return DrafterConfig(
        hidden_size=g.hidden,
        intermediate_size=g.intermediate,
        num_hidden_layers=g.layers,
        num_attention_heads=g.heads,
        num_key_value_heads=g.kv_heads,
        head_dim=g.head_dim,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_position_embeddings=40960,
        vocab_size=g.vocab,
        block_size=g.block,
        mask_token_id=g.vocab - 1,
        target_layer_ids=tuple(range(1, 1 + g.taps)),
        num_target_layers=36,
        layer_types=layer_types,
        sliding_window=window,
    )


# --- one step, in a process of its own ----------------------------------------------------------


class Clock:
    """Marks points in time on the device, and the seconds between them."""

    def __init__(self, device: str):
        self.device = device
        self.marks: list[Any] = []

    def mark(self) -> None:
        import torch

        if self.device == "cuda":
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Seconds between neighbouring marks; waits for the device and forgets the marks."""
        import torch

        pairs = list(zip(self.marks, self.marks[1:], strict=False))
        self.marks = []
        if self.device == "cuda":
            torch.cuda.synchronize()
            return [a.elapsed_time(b) / 1000 for a, b in pairs]
        return [b - a for a, b in pairs]


class Training:
    """A drafter, its optimiser and one pack; `step` trains once."""

    def __init__(self, case: Case, g: Geometry, device: str):
        import torch

        from dflash.attention import GROUP_BYTES, group_rows_within
        from dflash.drafter import Drafter

        self.case, self.g, self.device = case, g, device
        random = torch.Generator().manual_seed(0)
        with torch.device(device):
            torch.manual_seed(0)
            self.drafter = Drafter(make_config(g, ("full_attention",) * g.layers, None))
            self.embed_VH = torch.randn(g.vocab, g.hidden, dtype=torch.bfloat16)
            self.head_VH = torch.randn(g.vocab, g.hidden, dtype=torch.bfloat16) / g.hidden**0.5
            self.taps_SD = torch.randn(case.context, g.taps * g.hidden, dtype=torch.bfloat16)
        self.optimizer = torch.optim.AdamW(self.drafter.parameters(), lr=1e-5, fused=True)
        limit = case.context - g.block
        chosen = torch.randperm(limit, generator=random)[: case.anchors].sort().values
        self.anchors = chosen
        ids = torch.randint(g.vocab, (case.context,), generator=random)
        self.tokens_N = ids[chosen].to(device)
        self.labels_NB = ids[chosen[:, None] + torch.arange(g.block)].to(device)
        self.group_rows = case.group_rows or group_rows_within(
            GROUP_BYTES[device], case.context, g.block, g.heads, g.kv_heads, g.head_dim, itemsize=2
        )
        self.clock = Clock(device)

    def layout(self):
        import torch

        from dflash.attention import Layout

        starts = torch.tensor([0, self.case.context])
        return Layout(starts, self.anchors, self.g.block, self.group_rows)

    def step(self, layout=None) -> tuple[float, float]:
        """One training step. Returns seconds of all of it and of the optimiser alone."""
        import torch

        from dflash.drafter import block_input
        from dflash.loss import slot_losses, slot_weights

        g, case, clock = self.g, self.case, self.clock
        clock.mark()
        layout = layout or self.layout()
        self.optimizer.zero_grad(set_to_none=True)
        block_NBH = block_input(self.embed_VH, self.tokens_N, g.block, g.vocab - 1).float()
        with torch.autocast(self.device, torch.bfloat16):
            hidden_NBH = self.drafter(
                self.taps_SD, block_NBH, layout, case.backend, checkpointing=case.checkpointing
            )
        weights_NB = slot_weights(g.block, 7.0).to(self.device).expand(case.anchors, -1)
        rows = weights_NB > 0
        ce, *_ = slot_losses(hidden_NBH[rows], self.head_VH, self.labels_NB[rows])
        ((weights_NB[rows] * ce).sum() / weights_NB.sum()).backward()
        clock.mark()
        self.optimizer.step()
        clock.mark()
        passes, optimizer = clock.seconds()
        return passes + optimizer, optimizer


def measure(case: Case, g: Geometry, device: str) -> dict[str, Any]:
    """Times, memory and kernels of one case."""
    import torch

    training = Training(case, g, device)
    for _ in range(2):
        training.step()
    training.optimizer.zero_grad(set_to_none=True)
    cuda = device == "cuda"
    out: dict[str, Any] = {"group_rows": training.group_rows}
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        out["resident_gib"] = round(torch.cuda.memory_allocated() / GIB, 2)
    steps = [training.step() for _ in range(5)]
    out["step_seconds"] = round(statistics.median(s for s, _ in steps), 5)
    out["step_range"] = [round(f(s for s, _ in steps), 5) for f in (min, max)]
    out["optimizer_seconds"] = round(statistics.median(o for _, o in steps), 5)
    if cuda:
        out["peak_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 2)
        out["reserved_gib"] = round(torch.cuda.max_memory_reserved() / GIB, 2)
    layout = training.layout()
    training.step(layout)  # masks are made at first use
    reused = [training.step(layout)[0] for _ in range(3)]
    out["reused_seconds"] = round(statistics.median(reused), 5)
    pairs = visible_pairs(training.anchors.tolist(), g.block)
    out["flops"] = step_flops(pairs, case.context, case.anchors, **asdict(g))
    if case.backend == "flex":
        from torch._dynamo.utils import counters

        out["compiled_graphs"] = counters["stats"].get("unique_graphs", 0)
    try:
        out |= kernels(training.step, cuda)
    except Exception as e:  # the profiler does not work on every machine; the times stand without
        out["kernel"] = f"profiler failed: {e!r}"[:300]
    return out


ATTENTION = re.compile(r"flash|fmha|scaled_dot_product|attention|softmax|triton_tem", re.IGNORECASE)


def kernels(run: Callable[[], Any], cuda: bool) -> dict[str, Any]:
    """Which attention operators and kernels a step calls, and what takes its time."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as p:
        run()
    table = p.key_averages()
    on_device = DeviceType.CUDA if cuda else DeviceType.CPU

    def milliseconds(e) -> float:
        return (e.self_device_time_total if cuda else e.self_cpu_time_total) / 1000

    found = sorted((e for e in table if e.device_type == on_device), key=milliseconds)[::-1]
    every = [
        {"name": e.key[:120], "ms": round(milliseconds(e), 3), "calls": e.count} for e in found
    ]
    operators = [e for e in table if e.key.startswith("aten::_scaled_dot_product")]
    names = {re.sub(r"aten::_scaled_dot_product_|_?backward$", "", e.key) for e in operators}
    fused = [k for k in every if ATTENTION.search(k["name"])]
    if not operators and any(re.search("flex|triton_tem", k["name"]) for k in fused):
        names = {"flex_attention (compiled)"}
    return {
        "kernel": ", ".join(sorted(names)) or "none: softmax written out",
        "attention_kernels": fused[:8],
        "top_kernels": every[:14],
    }


# --- gradients ----------------------------------------------------------------------------------

MODES = {
    "chunked": ("none", "layer", "group"),
    "split": ("none", "layer", "group", "selective"),
    "gather": ("none", "group"),
    "dense": ("none", "layer"),
    "flex": ("none", "layer"),
}
LIMITS = {"float32": 1e-3, "bfloat16": 4e-2}


def gradients(backends: tuple[str, ...], device: str) -> dict[str, Any]:
    """Gradients of a small drafter against float64: relative difference of their norm, the worst."""
    import torch

    from dflash.attention import Layout
    from dflash.drafter import Drafter

    g, random = SMALL, torch.Generator().manual_seed(0)
    config = make_config(g, ("full_attention", "sliding_attention"), window=100)
    starts = torch.tensor([0, 300, 500])
    anchors = torch.randperm(484, generator=random)[:24].sort().values
    taps = torch.randn(500, g.taps * g.hidden, generator=random, dtype=torch.float64)
    shape = (len(anchors), g.block, g.hidden)
    block = torch.randn(shape, generator=random, dtype=torch.float64)
    slope = torch.randn(shape, generator=random, dtype=torch.float64)

    def run(backend: str, mode: str, dtype: torch.dtype, autocast: bool, where: str):
        drafter = Drafter(config)
        drafter.init_weights(0)
        drafter = drafter.to(where, dtype)
        layout = Layout(starts, anchors, g.block, group_rows=4 * g.block)
        with torch.autocast(where, torch.bfloat16, enabled=autocast):
            hidden = drafter(
                taps.to(where, dtype), block.to(where, dtype), layout, backend, checkpointing=mode
            )
        (hidden.double() * slope.to(where)).sum().backward()
        return {name: p.grad.double().cpu() for name, p in drafter.named_parameters()}

    want = run("dense", "none", torch.float64, False, "cpu")
    rows = []
    for backend in backends:
        for mode in MODES[backend]:
            for name, limit in LIMITS.items():
                row: dict[str, Any] = {"backend": backend, "checkpointing": mode, "dtype": name}
                try:
                    found = run(backend, mode, torch.float32, name == "bfloat16", device)
                    off = {n: float((found[n] - w).norm() / w.norm()) for n, w in want.items()}
                    at = max(off, key=lambda n: off[n] if off[n] == off[n] else float("inf"))
                    row |= {"worst": float(f"{off[at]:.3g}"), "at": at, "ok": off[at] <= limit}
                except Exception as e:
                    row |= {"failed": failure(e)}
                rows.append(row)
    return {"gradients": rows}


def card(device: str) -> dict[str, Any]:
    """The machine, and the rate of a large matrix product on it."""
    import torch

    cuda = device == "cuda"
    out: dict[str, Any] = {"torch": torch.__version__, "device": device}
    if cuda:
        about = torch.cuda.get_device_properties(0)
        out |= {"card": about.name, "memory_gib": round(about.total_memory / GIB, 1)}
        out |= {"capability": f"{about.major}.{about.minor}", "cuda": torch.version.cuda}
    size = 8192 if cuda else 512
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in "ab")
    clock, seconds = Clock(device), []
    for _ in range(13):
        clock.mark()
        a @ b
        clock.mark()
        seconds += clock.seconds()
    out["bf16_tflops"] = round(2 * size**3 / statistics.median(seconds[3:]) / 1e12, 3)
    return out


def failure(e: BaseException) -> str:
    """An exception in a line; out of memory is named as that."""
    import torch

    if isinstance(e, torch.OutOfMemoryError):
        return "out of memory: " + str(e).split(". ")[0][:200]
    last = traceback.extract_tb(e.__traceback__)[-1]
    return f"{type(e).__name__} at {Path(last.filename).name}:{last.lineno}: {str(e)[:400]}"


def in_process(case: Case, device: str) -> dict[str, Any]:
    """What the process of a case does."""
    try:
        if case.backend == "gradients":
            backends = ("chunked", "split", "gather", "dense")
            return card(device) | gradients(backends, device)
        if case.backend == "gradients-flex":
            return gradients(("flex",), device)
        return measure(case, QWEN3_8B if device == "cuda" else TOY, device)
    except Exception as e:
        return {"failed": failure(e)}


# --- all cases ----------------------------------------------------------------------------------


def run_case(case: Case, device: str, limit: float) -> dict[str, Any]:
    """Run a case in a process of its own, ended with all it started when its time is over."""
    command = [sys.executable, __file__, "--case", json.dumps(asdict(case)), "--device", device]
    begun = time.perf_counter()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a group of its own: the compiler starts workers
    )
    try:
        out, err = process.communicate(timeout=limit)
        lines = [line for line in out.splitlines() if line.startswith("{")]
        if lines:
            found = json.loads(lines[-1])
        else:
            found = {"failed": f"exit status {process.returncode}: {err.strip()[-400:]}"}
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        found = {"failed": f"took more than {limit:.0f} s"}
    return found | {"wall_seconds": round(time.perf_counter() - begun, 1)}


def show(row: dict[str, Any], rate: float | None) -> str:
    """A case as lines of text."""
    name = f"{row['case']:<34}"
    if "failed" in row:
        return f"{name} {row['failed']}"
    if "gradients" in row:
        lines = []
        for r in row["gradients"]:
            label = f"  {r['backend']} {r['checkpointing']} {r['dtype']}"
            said = r.get("failed") or f"{r['worst']:.1e} {'ok' if r['ok'] else 'WRONG'} ({r['at']})"
            lines.append(f"{label:<34} {said}")
        return "\n".join([row["case"], *lines])
    ms = [1000 * row[k] for k in ("step_seconds", "reused_seconds", "optimizer_seconds")]
    times = "".join(f"{m:9.1f}" for m in ms)
    floor = f"{1000 * row['flops'] / rate / 1e12:9.1f}" if rate else f"{'–':>9}"
    memory = "".join(
        f"{row[k]:9.1f}" if k in row else f"{'–':>9}" for k in ("peak_gib", "resident_gib")
    )
    return f"{name}{times}{floor}{memory}  {row['kernel']}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file (default: benchmarks/results/gpu-DATE.json "
                        "on a card, else none)")  # fmt: skip
    parser.add_argument(
        "--only", nargs="+", help="only cases with one of these words in their name"
    )
    parser.add_argument("--budget", type=float, default=440, help="seconds for everything")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), help="default: cuda where there is one"
    )
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print("\n" + json.dumps(in_process(Case(**json.loads(args.case)), args.device)))
        return 0
    begun = time.perf_counter()
    if args.device is None:
        import torch

        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    cuda = args.device == "cuda"
    cases = cuda_cases() if cuda else toy_cases()
    if args.only:
        cases = [c for c in cases if set(args.only) & set(c.name.split())]
    path = args.out
    if path is None and cuda:
        path = ROOT / f"benchmarks/results/gpu-{datetime.date.today()}.json"
    result: dict[str, Any] = {"date": str(datetime.date.today()), "cases": []}
    result["geometry"] = asdict(QWEN3_8B if cuda else TOY)
    if not cuda:
        print("No CUDA card: the same code at toy size on the CPU; times mean nothing.")
    heads = ("step ms", "reused", "optim", "floor", "peak GiB", "resident")
    print(f"{'case':<34}{''.join(f'{h:>9}' for h in heads)}  kernel")
    for case in cases:
        left = args.budget - (time.perf_counter() - begun)
        row: dict[str, Any] = {"case": case.name}
        if left < 15 and cuda:
            row["failed"] = "skipped: the budget is spent"
        else:
            row |= run_case(case, args.device, min(case.limit, max(left, 10)))
        for name in ("torch", "device", "card", "memory_gib", "capability", "cuda", "bf16_tflops"):
            if name in row:
                result[name] = row.pop(name)
        result["cases"].append(row)
        print(show(row, result.get("bf16_tflops")), flush=True)
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(result, indent=1) + "\n")
    about = ("card", "memory_gib", "cuda", "torch", "bf16_tflops", "date")
    print(" · ".join(f"{k} {result[k]}" for k in about if k in result))
    print(f"{time.perf_counter() - begun:.0f} s" + (f"; wrote {path}" if path else ""))
    wrong = [r for c in result["cases"] for r in c.get("gradients", []) if not r.get("ok", True)]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
