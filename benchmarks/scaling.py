"""Time and memory of our training step against context rows and anchors, up to 16,384 x 1,024.

    python benchmarks/scaling.py [--quick] [--json] [--backends chunked split] [--out FOLDER]

The drafter of training_step.py (2 layers, width 256, vocabulary 8,192), without checkpointing; every
point is a fresh process with one thread and one step, time and memory read as there. `dense` and
`gather` hold so much that they run only where it is estimated to fit `--limit-gib` (see `held_bytes`).

A backend's growth is a least-squares fit of seconds (and of MiB) to constant · context^p · anchors^q
over the points with at least 2,048 rows. Its attention alone would have p = q = 1 where every slot
is scored against its document's context only, and q = 2 where it is scored against all other slots.

Writes scaling-DATE.jsonl (a line a point, then a line a fit) and scaling-DATE.svg.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import sys
from pathlib import Path
from typing import Any

from training_step import (
    BLOCK,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    ROOT,
    Case,
    own_command,
    run_json,
)

from dflash.drawing import Frame, Html, colour, el, join, marker

CONTEXTS = (1024, 2048, 4096, 8192, 16384)
ANCHORS = (64, 128, 256, 512, 1024)
QUICK = (Case(512, 32), Case(1024, 64))
BACKENDS = ("chunked", "split", "gather", "dense")
FITTED_FROM = 2048  # rows; below, what does not depend on the context is most of the step


def cases() -> list[Case]:
    """Context and anchors, at most one anchor in eight rows; small ones first."""
    every = [Case(s, n) for s in CONTEXTS for n in ANCHORS if 8 * n <= s]
    return sorted(every, key=lambda c: c.context * c.anchors)


def held_bytes(backend: str, case: Case) -> int:
    """A rough upper bound of what attention holds at once; 0 for the backends that hold little.

    dense: float32 scores of every slot over all context rows and slots for each head, kept once a
    layer and three times more in one layer's backward pass. gather: for every block its keys and
    values and a float32 mask over the longest context of its chunk, kept for each layer.
    """
    slots = case.anchors * BLOCK
    if backend == "dense":
        return (LAYERS + 3) * 4 * HEADS * slots * (case.context + slots)
    if backend == "gather":
        keys = 2 * 4 * KV_HEADS * HEAD_DIM
        mask = (4 + 1) * BLOCK * HEADS // KV_HEADS
        return LAYERS * case.anchors * (case.context + BLOCK) * (keys + mask)
    return 0


def fit(points: list[dict[str, Any]], what: str) -> dict[str, float] | None:
    """Exponents of context and anchors in `what`, and the largest factor that a point is off by.

    None where points differ in fewer than two contexts or two numbers of anchors.
    """
    import numpy as np

    points = [p for p in points if p["context"] >= FITTED_FROM and p[what] > 0]
    if min(len({p[k] for p in points}) for k in ("context", "anchors")) < 2:
        return None
    x = np.array([[1.0, math.log(p["context"]), math.log(p["anchors"])] for p in points])
    y = np.array([math.log(p[what]) for p in points])
    solution = np.linalg.lstsq(x, y, rcond=None)[0]
    _, of_context, of_anchors = solution
    off = np.abs(x @ solution - y).max()
    return {
        "context": round(float(of_context), 2),
        "anchors": round(float(of_anchors), 2),
        "off_by": round(math.exp(float(off)), 2),
        "points": len(points),
    }


# --- drawing ------------------------------------------------------------------------------------

WIDTH, HEIGHT, GAP = 380, 250, 24
STYLE = """
text{font:11px system-ui,sans-serif;fill:#333}.axis{fill:#666}.grid{stroke:#ddd}
.line{fill:none;stroke:currentColor;stroke-width:1.6}.dot{fill:currentColor}
.s0{color:#0072b2}.s1{color:#d55e00}.s2{color:#009e73}.s3{color:#cc79a7}.title{font-weight:600}
"""


def powers(low: float, high: float, base: int) -> list[float]:
    """Powers of a base from at or below `low` to at or above `high`, at least two."""
    first = math.floor(math.log(low, base) + 1e-9)
    last = max(math.ceil(math.log(high, base) - 1e-9), first + 1)
    return [float(base) ** i for i in range(first, last + 1)]


def panel(
    points: list[dict[str, Any]], along: str, fixed: dict[str, list[int]], what: str, unit: str
) -> Html:
    """One chart with logarithmic axes: `what` against `along`, a curve a backend and fixed value."""
    ((other, values),) = fixed.items()
    curves = []
    for look, backend in enumerate(BACKENDS):
        for value in values:
            at = [p for p in points if p["backend"] == backend and p[other] == value]
            curve = sorted((p[along], p[what]) for p in at if p[what] > 0)
            if curve:
                curves.append((look, backend, value, curve))
    title = el("text", f"{unit} against {along}", x=2, y=12, class_="title")
    if not curves:
        return join(title, el("text", "nothing measured here", x=2, y=30))
    xs, ys = zip(*(point for *_, curve in curves for point in curve), strict=True)
    x_ticks, y_ticks = powers(min(xs), max(xs), 2), powers(min(ys), max(ys), 10)
    ends = [(math.log(t[0]), math.log(t[-1])) for t in (x_ticks, y_ticks)]
    frame = Frame(*ends, right=WIDTH - 84, bottom=HEIGHT - 34)
    parts = [title]
    for t in y_ticks:
        y = frame.py(math.log(t))
        parts.append(el("line", x1=frame.left, x2=frame.right, y1=y, y2=y, class_="grid"))
        parts.append(el("text", f"{t:g}", x=frame.left - 6, y=y + 4, text_anchor="end"))
    for t in x_ticks:
        x = frame.px(math.log(t))
        parts.append(el("text", f"{t:g}", x=x, y=frame.bottom + 14, text_anchor="middle"))
    below, last = -math.inf, sorted(curves, key=lambda c: -c[3][-1][1])
    for look, backend, value, curve in last:
        at = [(frame.px(math.log(x)), frame.py(math.log(y))) for x, y in curve]
        path = " ".join(f"{x},{y}" for x, y in at)
        dashes = None if value == values[-1] else "4 3"
        style = f"line {colour(look)}"
        parts.append(el("polyline", points=path, class_=style, stroke_dasharray=dashes))
        for (x, y), (_, figure) in zip(at, curve, strict=True):
            parts.append(marker(look, x, y, title=f"{backend}, {value} {other}: {figure:g}"))
        below = max(at[-1][1] + 4, below + 12)
        label = f"{backend} {value}"
        parts.append(el("text", label, x=frame.right + 6, y=below, class_=colour(look)))
    note = el("text", f"{along} (beside a curve: {other})", x=frame.right, y=frame.bottom + 29,
              text_anchor="end", class_="axis")  # fmt: skip
    return join(parts, note)


def draw(points: list[dict[str, Any]]) -> str:
    """The whole drawing: seconds above, MiB below; against anchors at the left, context right."""
    contexts = sorted({p["context"] for p in points})
    anchors = sorted({p["anchors"] for p in points})
    # The ends of what was measured, with the smaller where dense and gather still have points.
    rows, counts = contexts[len(contexts) // 4], anchors[len(anchors) // 4]
    by_anchors = {"context": sorted({rows, contexts[-1]})}
    by_context = {"anchors": sorted({counts, anchors[-1]})}
    placed = []
    for row, (what, unit) in enumerate((("seconds", "seconds a step"), ("mib", "peak MiB"))):
        for column, (along, fixed) in enumerate((("anchors", by_anchors), ("context", by_context))):
            place = f"translate({column * (WIDTH + GAP)} {row * (HEIGHT + GAP) + 4})"
            placed.append(el("g", panel(points, along, fixed, what, unit), transform=place))
    size = f"0 0 {2 * WIDTH + GAP} {2 * HEIGHT + GAP + 8}"
    xmlns = "http://www.w3.org/2000/svg"
    background = el("rect", width="100%", height="100%", fill="#fff")
    title = el("title", "Our training step against context and anchors")
    style = el("style", Html(STYLE))
    return str(el("svg", title, style, background, placed, viewBox=size, xmlns=xmlns)) + "\n"


# --- run ----------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    parser.add_argument("--checkpointing", default="none", help="of every point (default none)")
    parser.add_argument("--limit-gib", type=float, default=4.0,
                        help="what dense and gather may hold (default 4 GiB)")  # fmt: skip
    parser.add_argument("--limit", type=float, default=600, help="seconds that one point may take")
    parser.add_argument("--out", type=Path, help="folder to write to (default: benchmarks/results, "
                        "with --quick none)")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="two small points a backend")
    parser.add_argument("--json", action="store_true", help="print the lines of the .jsonl")
    args = parser.parse_args()
    args.group_rows = args.loss_rows = None  # the package's own choice
    points: list[dict[str, Any]] = []
    lines: list[dict[str, Any]] = []

    def say(entry: dict[str, Any], text: str) -> None:
        lines.append(entry)
        print(json.dumps(entry) if args.json else text, flush=True)

    if not args.json:
        print(f"{'context x anchors':<20}{'backend':<10}{'seconds':>9}{'MiB':>9}{'arithmetic':>12}")
    for case in QUICK if args.quick else cases():
        for backend in args.backends:
            if held_bytes(backend, case) > args.limit_gib * 2**30:
                continue
            args.backend = backend
            found = run_json(own_command(case, args.checkpointing, args), args.limit)
            point = {"case": case.name, "context": case.context, "anchors": case.anchors}
            point |= {k: found[k] for k in ("backend", "group_rows", "pairs")}
            point |= {k: round(found[k], 4) for k in ("seconds", "cpu_seconds", "mib")}
            point["arithmetic"] = round(found["flops"] / found["gemm_rate"], 4)
            points.append(point)
            say(point, f"{case.name:<20}{backend:<10}{point['seconds']:>9.3f}{point['mib']:>9.0f}"
                       f"{point['arithmetic']:>12.3f}")  # fmt: skip
    for backend in args.backends:
        own = [p for p in points if p["backend"] == backend]
        for what in ("seconds", "mib"):
            found_fit = fit(own, what)
            if found_fit:
                f = found_fit
                say({"fit": what, "backend": backend} | f,
                    f"{backend}: {what} grow as context^{f['context']} · anchors^{f['anchors']} "
                    f"({f['points']} points, none off by more than {f['off_by']}x)")  # fmt: skip
    folder = args.out or (None if args.quick else ROOT / "benchmarks/results")
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"scaling-{datetime.date.today()}"
        path.with_suffix(".jsonl").write_text("".join(json.dumps(e) + "\n" for e in lines))
        path.with_suffix(".svg").write_text(draw(points))
        print(f"wrote {path}.jsonl and {path}.svg", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
