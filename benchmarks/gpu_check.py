"""Our training and decoding on a CUDA card at Qwen3-8B geometry: gradients, time, memory and kernels.

    benchmarks/gpu_check.sh [--out FILE] [--only WORD ...] [--budget SECONDS] [--toy]

The drafter of Qwen3-8B (width 4096, 5 layers, 32:8 heads of 128, block 16, 5 taps, vocabulary 151,936;
1.05 B weights), bf16 autocast over float32 weights with their AdamW state, one document of 8,192 tokens
with 512 anchors and one of 8,000 with 1,024. First of all the gradients of every backend and checkpoint
mode against the slow one on the CPU, by a step of a small drafter (`dflash.gradient_check`). Then, for
each backend, checkpoint mode and size of groups:

- `step`: forward, backward and optimiser, median of 5 after 2 to warm up (CUDA events). Anchors are
  others in every step, and their layout is made again, as in training; `reused` is the step with one
  layout kept, so what it costs on the host shows; `optim` is the optimiser's part.
- `peak`: torch.cuda.max_memory_allocated over those steps; `resident` is what lies there between them
  (weights, optimiser state, embedding, head, features).
- `kernel`: attention operators and CUDA kernels that torch.profiler saw in one more step.

Others print a line of their own:

- `loop`: the step as training runs it: two packs in pinned memory, copied on a side stream, losses,
  gradient norm, optimiser; by the wall clock.
- `decode`, `decode cudnn`: milliseconds a token of plain decoding and a cycle of drafting, of a random
  target of 12 layers, with cuDNN's attention last (as the package sets it) and first (torch's own order).
- `prefill`, `prefill cudnn`: the same of reading 8 x 2,048 tokens, as `extract` does.
- `loss`: the loss of 7,680 rows over the whole vocabulary for some sizes of its groups of logits.
- `own-slots`: `benchmarks/own_slots.py` for some sizes of groups.

Every case has a process and a time limit of its own: what runs out of memory, hangs or crashes is
recorded as that, and the others go on. Cases stand in order of importance, and those that do not fit the
whole budget (default 440 s) are recorded as skipped. The JSON is rewritten after each case. The exit
status is 1 where a gradient is off or a case failed (running out of memory is no failure of `dense` and
`gather`, which keep what the others do not). `--toy` runs all of it at toy size on whatever is there, so
that it is known to work; without CUDA that is implied. Times then mean nothing.
Needs torch, numpy, safetensors and, to decode, transformers; no network, nothing installed of this project.
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


MEASURED = ("split", "chunked", "gather", "dense", "flex")  # cases of a whole step
UNBOUNDED = ("gather", "dense")  # may run out of memory


@dataclass(frozen=True)
class Case:
    """One row of the table: a backend's step, or something else by its name."""

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
        mode = f" {self.checkpointing}" if self.backend in MEASURED else ""
        return f"{self.context}x{self.anchors} {self.backend}{mode}{rows}"


def cases(small: tuple[int, int], large: tuple[int, int], flex: bool = True) -> list[Case]:
    """What runs, the most important first. Compiling flex takes longer."""
    out = [Case("gradients", limit=120)]
    out += [Case("split", *small, mode) for mode in ("selective", "layer", "none")]
    out += [Case("split", *small, "layer", group_rows=r) for r in (256, 512)]
    out += [Case("loop", *small, "selective"), Case("decode"), Case("decode cudnn")]
    out += [Case("loss", *small), Case("own-slots", *small), Case("prefill"), Case("prefill cudnn")]
    out += [Case("chunked", *small, "layer")]
    out += [Case("split", *large, mode) for mode in ("selective", "layer", "none")]
    out += [Case("gather", *large, "group")]
    out += [Case("flex", *small, "layer", limit=110)] * flex
    out += [Case("split", *large, "layer", group_rows=r) for r in (512, 2048)]
    out += [Case("dense", *small, "layer"), Case("gather", *small, "group")]
    out += [Case("gather", *large), Case("dense", *large, "layer")]
    return out + [Case("flex", *large, limit=110)] * (flex and large[0] > 1000)


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
        self.random, self.ids = random, torch.randint(g.vocab, (case.context,), generator=random)
        self.draw()
        self.group_rows = case.group_rows or group_rows_within(
            GROUP_BYTES[device], case.context, g.block, g.heads, g.kv_heads, g.head_dim, itemsize=2
        )
        self.clock = Clock(device)

    def draw(self) -> None:
        """Other anchors, as every step has them."""
        import torch

        limit = self.case.context - self.g.block
        order = torch.randperm(limit, generator=self.random)
        self.anchors = order[: self.case.anchors].sort().values
        self.tokens_N = self.ids[self.anchors].to(self.device)
        at_NB = self.anchors[:, None] + torch.arange(self.g.block)
        self.labels_NB = self.ids[at_NB].to(self.device)

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
        if layout is None:
            self.draw()
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
    toy = g == TOY
    for _ in range(1 if toy else 2):
        training.step()
    training.optimizer.zero_grad(set_to_none=True)
    cuda = device == "cuda"
    out: dict[str, Any] = {"group_rows": training.group_rows}
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        out["resident_gib"] = round(torch.cuda.memory_allocated() / GIB, 2)
    steps = [training.step() for _ in range(2 if toy else 5)]
    out["step_seconds"] = round(statistics.median(s for s, _ in steps), 5)
    out["step_range"] = [round(f(s for s, _ in steps), 5) for f in (min, max)]
    out["optimizer_seconds"] = round(statistics.median(o for _, o in steps), 5)
    if cuda:
        out["peak_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 2)
        out["reserved_gib"] = round(torch.cuda.max_memory_reserved() / GIB, 2)
    layout = training.layout()
    training.step(layout)  # masks are made at first use
    reused = [training.step(layout)[0] for _ in range(1 if toy else 3)]
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
    "split": ("none", "layer", "group", "selective"),
    "chunked": ("none", "layer", "group"),
    "gather": ("none", "group"),
    "dense": ("none", "layer"),
}


def gradients(device: str, toy: bool) -> dict[str, Any]:
    """Gradients of a small drafter with heads as wide as the real ones, against the CPU's."""
    import torch

    from dflash import gradient_check

    shape = gradient_check.like(4, 2, 64, 4) if toy else gradient_check.like(32, 8, 128)
    want, rows = gradient_check.reference(shape), []
    for backend, modes in MODES.items():
        for mode in modes:
            for name in gradient_check.LIMITS:
                try:
                    where = torch.device(device)
                    row = gradient_check.compare(shape, where, backend, mode, name, want)
                except Exception as e:
                    row = {"backend": backend, "checkpointing": mode, "dtype": name}
                    row |= {"failed": failure(e), "ok": False}
                rows.append(row)
    return {"gradients": rows}


# --- the loop, decoding, loss and own slots -------------------------------------------------------


def loop(case: Case, g: Geometry, device: str) -> dict[str, Any]:
    """The step as training runs it, over two packs in pinned memory."""
    import torch

    from dflash import gradient, gradient_check

    shape = gradient_check.Shape(
        *(g.heads, g.kv_heads, g.head_dim, g.hidden, g.layers, g.vocab, g.block, None),
        lengths=((case.context,), (case.context,)),
        anchors=case.anchors,
        taps=g.taps,
    )
    where = torch.device(device, 0) if device == "cuda" else torch.device(device)
    step = gradient_check.Step(shape, where, "split", case.checkpointing, "bfloat16")
    optimizer = torch.optim.AdamW(step.drafter.parameters(), lr=1e-5, fused=True)
    seconds, parts = [], []
    for turn in range(2 if g == TOY else 6):
        made = time.perf_counter()
        packs = list(step.packs())
        made = time.perf_counter() - made
        optimizer.zero_grad(set_to_none=True)
        if device == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        step.run(packs)
        gradient.gradient_norm(step.drafter, 1.0)
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        if turn:
            seconds.append(time.perf_counter() - begun)
            parts.append(made)
    step_ms, made_ms = (1000 * statistics.median(x) for x in (seconds, parts))
    peak = torch.cuda.max_memory_allocated() / GIB if device == "cuda" else 0.0
    return {
        "text": f"{step_ms:.1f} ms for two packs, made by the host in {made_ms:.1f} ms; peak {peak:.1f} GiB",
        "step_seconds": step_ms / 1000,
        "host_seconds": made_ms / 1000,
        "peak_gib": round(peak, 2),
    }


def make_target(device: str, toy: bool):
    """A random Qwen3 and a drafter of its shape, in bfloat16."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from dflash.drafter import Drafter

    width, layers, heads, kv, d, vocab = (
        (64, 4, 4, 2, 16, 320) if toy else (2048, 12, 16, 8, 128, 50000)
    )
    with torch.device(device):
        torch.manual_seed(0)
        target = Qwen3ForCausalLM(
            Qwen3Config(
                hidden_size=width,
                intermediate_size=3 * width,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                num_key_value_heads=kv,
                head_dim=d,
                vocab_size=vocab,
                max_position_embeddings=8192,
                attn_implementation="sdpa",
            )
        )
        g = Geometry(width, 3 * width, 2 if toy else 5, heads, kv, d, vocab, taps=2)
        drafter = Drafter(make_config(g, ("full_attention",) * g.layers, None))
    made = (x.to(torch.bfloat16).eval().requires_grad_(False) for x in (target, drafter))
    return *made, vocab


def decode(device: str, toy: bool) -> dict[str, Any]:
    """Milliseconds a token of plain decoding, and a cycle of drafting, one prompt."""
    import torch

    from dflash.decode import generate

    target, drafter, vocab = make_target(device, toy)
    random = torch.Generator().manual_seed(0)
    prompt = torch.randint(vocab, (40 if toy else 256,), generator=random).tolist()
    found = {}
    for name, given in (("plain", None), ("drafted", drafter)):
        for count in (4, 12 if toy else 96):
            (response,), timing = generate(target, [prompt], count, [], given)
        spent = timing.draft + timing.verify
        found[name] = 1000 * spent / max(1, len(response.cycles))
    text = f"{found['plain']:.2f} ms a token plain, {found['drafted']:.2f} ms a cycle of drafting"
    return {"text": text, **{f"{k}_ms": round(v, 3) for k, v in found.items()}}


def prefill(device: str, toy: bool) -> dict[str, Any]:
    """Milliseconds of reading some documents, of several widths, as `extract` does."""
    import torch

    from dflash.taps import Taps, run_decoder

    target, _, vocab = make_target(device, toy)
    target, clock, seconds = target.to(device), Clock(device), []
    with torch.inference_mode(), Taps(target, [1, 2], torch.bfloat16) as taps:
        for turn in range(7):
            width = (64 if toy else 2048) - 8 * turn  # every batch has another
            ids = torch.randint(vocab, (2 if toy else 8, width)).to(device)
            clock.mark()
            run_decoder(target, input_ids=ids, use_cache=False)
            taps.stack()
            clock.mark()
            seconds += clock.seconds()[-1:]
    ms = 1000 * statistics.median(seconds[2:])
    return {"text": f"{ms:.1f} ms a batch, each of another width", "batch_ms": round(ms, 2)}


def losses(case: Case, g: Geometry, device: str) -> dict[str, Any]:
    """Forward and backward of the loss by the rows of logits that exist at once."""
    import torch

    from dflash.loss import rows_within, slot_losses

    rows = case.anchors * (g.block - 1)
    with torch.device(device):
        hidden = torch.randn(rows, g.hidden, requires_grad=True)
        head = torch.randn(g.vocab, g.hidden, dtype=torch.bfloat16) / g.hidden**0.5
        labels = torch.randint(g.vocab, (rows,))
    clock, found = Clock(device), {}
    usual = rows_within(device, g.vocab)
    for chunk in (usual // 2, usual, 2 * usual, 4 * usual):
        seconds = []
        for _ in range(4):
            hidden.grad = None
            clock.mark()
            slot_losses(hidden, head, labels, chunk).loss_R.sum().backward()
            clock.mark()
            seconds += clock.seconds()
        found[chunk] = 1000 * statistics.median(seconds[1:])
    clock.mark()
    wide = hidden.detach().bfloat16()
    (wide @ head.T) @ head
    clock.mark()
    floor = 1000 * clock.seconds()[0]
    text = ", ".join(f"{n} rows {ms:.1f} ms" for n, ms in found.items())
    return {"text": f"{text}; the products alone {floor:.1f} ms", "ms": found, "products_ms": floor}


def own_slots(case: Case, g: Geometry, device: str) -> dict[str, Any]:
    """Attention of one layer with the own slots in a product of their own, against `split`."""
    import own_slots

    found, lines = {}, []
    heads = g.heads, g.kv_heads, g.head_dim
    for rows in (128, 256) if g == TOY else (256, 512, 1024):
        problem = own_slots.Problem(case.context, case.anchors, device, rows, heads)
        for variant in ("split", "own", "rectangle"):
            off = own_slots.difference(problem, variant)
            ms = 1000 * own_slots.seconds(problem, variant, 3)
            found[f"{variant} {rows}"] = {"ms": round(ms, 3), "off": off}
        one = [f"{v} {found[f'{v} {rows}']['ms']:.1f}" for v in ("split", "own", "rectangle")]
        lines.append(f"rows {rows}: {', '.join(one)} ms")
    return {"text": "; ".join(lines), "variants": found}


def card(device: str, toy: bool) -> dict[str, Any]:
    """The machine, and the rate of a large matrix product on it."""
    import torch

    cuda = device == "cuda"
    out: dict[str, Any] = {"torch": torch.__version__, "device": device}
    if cuda:
        about = torch.cuda.get_device_properties(0)
        out |= {"card": about.name, "memory_gib": round(about.total_memory / GIB, 1)}
        out |= {"capability": f"{about.major}.{about.minor}", "cuda": torch.version.cuda}
    size = 512 if toy else 8192
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


def in_process(case: Case, device: str, toy: bool) -> dict[str, Any]:
    """What the process of a case does."""
    g = TOY if toy else QWEN3_8B
    try:
        match case.backend:
            case "gradients":
                return card(device, toy) | gradients(device, toy)
            case "loop":
                return loop(case, g, device)
            case "decode" | "decode cudnn":
                return decode(device, toy)
            case "prefill" | "prefill cudnn":
                return prefill(device, toy)
            case "loss":
                return losses(case, g, device)
            case "own-slots":
                return own_slots(case, g, device)
            case _:
                return measure(case, g, device)
    except Exception as e:
        return {"failed": failure(e)}


# --- all cases ----------------------------------------------------------------------------------


def run_case(case: Case, device: str, limit: float, toy: bool) -> dict[str, Any]:
    """Run a case in a process of its own, ended with all it started when its time is over."""
    command = [sys.executable, __file__, "--case", json.dumps(asdict(case)), "--device", device]
    command += ["--toy"] * toy
    # the package sets this to 1 unless it is set
    more = {"TORCH_CUDNN_SDPA_DEPRIORITIZED": "0"} if "cudnn" in case.backend else {}
    if toy:
        more["OMP_NUM_THREADS"] = "1"  # other processes may compute beside it
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | more,
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
    return found


def show(row: dict[str, Any], rate: float | None) -> str:
    """A case as lines of text."""
    name = f"{row['case']:<34}"
    for key in ("failed", "skipped", "text"):
        if key in row:
            return f"{name} {row[key]}"
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
    parser.add_argument("--toy", action="store_true", help="everything at toy size")
    parser.add_argument(
        "--in-process", action="store_true", help="all cases in this process (tests)"
    )
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        found = in_process(Case(**json.loads(args.case)), args.device, args.toy)
        print("\n" + json.dumps(found))
        return 0
    begun = time.perf_counter()
    if args.device is None:
        import torch

        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    cuda, toy = args.device == "cuda", args.toy or args.device != "cuda"
    small, large = ((256, 16), (250, 32)) if toy else ((8192, 512), (8000, 1024))
    chosen = cases(small, large, flex=not toy or "flex" in (args.only or ()))
    if toy:  # each kind once
        kinds = {(c.backend, c.checkpointing, bool(c.group_rows)): c for c in reversed(chosen)}
        chosen = list(reversed(kinds.values()))
    if args.only:
        chosen = [c for c in chosen if set(args.only) & set(c.name.split())]
    path = args.out
    if path is None and not toy:
        path = ROOT / f"benchmarks/results/gpu-{datetime.date.today()}.json"
    result: dict[str, Any] = {"date": str(datetime.date.today()), "cases": []}
    result["geometry"] = asdict(TOY if toy else QWEN3_8B)
    if toy:
        where = "" if cuda else "No CUDA card: on the CPU, "
        print(f"{where}the same code at toy size; times mean nothing.")
    heads = ("step ms", "reused", "optim", "floor", "peak GiB", "resident")
    print(f"{'case':<34}{''.join(f'{h:>9}' for h in heads)}  kernel")
    for case in chosen:
        left = args.budget - (time.perf_counter() - begun)
        row: dict[str, Any] = {"case": case.name}
        if left < 15 and not toy:
            row["skipped"] = "skipped: the budget is spent"
        else:
            limit = min(case.limit, max(left, 10))
            started = time.perf_counter()
            run = in_process(case, args.device, toy) if args.in_process else None
            row |= run or run_case(case, args.device, limit, toy)
            row["wall_seconds"] = round(time.perf_counter() - started, 1)
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
    return 1 if any(map(bad, result["cases"])) else 0


def bad(row: dict[str, Any]) -> bool:
    """Whether a case fails the command."""
    if any(not r["ok"] for r in row.get("gradients", [])):
        return True
    allowed = any(b in row["case"].split() for b in UNBOUNDED)
    return "failed" in row and not (allowed and row["failed"].startswith("out of memory"))


if __name__ == "__main__":
    sys.exit(main())
