"""Stage `report`: everything the other stages found out, as one HTML page and one summary.

    python -m dflash.report --identity results/target/identity.json \\
        --corpus results/corpus/*.json --tokens results/tokens/*/*.json \\
        --features results/features/*/*.json \\
        --training results/drafters/*/training.json --evaluations results/evaluate/*/*.json \\
        --exports results/export/*/config.json --benchmarks results/benchmarks \\
        --html results/report.html --summary results/summary.json
    python -m dflash.report --show results/summary.json

The page needs nothing but itself: style and drawings (SVG, made by the functions here) are inline
and follow the reader's light or dark mode. Equal inputs give equal bytes. Text that comes from
data is escaped by construction: what is not `Html` is escaped where it becomes part of the page.
"""

from __future__ import annotations

import argparse
import csv
import html
import json
import math
import os
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from dflash.errors import UserError, entrypoint
from dflash.files import read_json, read_settings, write_json, write_text

STAGES = ("target", "corpus", "regenerate", "extract", "train", "evaluate", "export")


# --- what is read: the part of each file that the report uses -----------------------------------


class Read(BaseModel):
    """Base of what is read: other fields are ignored, numbers are finite."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class Lossless(Read):
    """How many outputs were compared with the target's own, and how many were the same."""

    checked: int
    identical: int


class Figures(Read):
    """Acceptance and speed on some prompts, as `evaluate` writes them and the summary repeats."""

    responses: int
    cycles: int
    tau_mean: float | None
    tau_mean_interval: tuple[float, float] | None = None
    tau_pooled: float | None
    speed_up: float | None
    lossless: Lossless
    per_slot: list[float]
    draft_share: float | None = None


class Timed(Read):
    """One prompt decoded alone."""

    sample_id: str
    drafted_seconds: float
    drafted_tokens: int
    plain_seconds: float
    plain_tokens: int


class Response(Read):
    """One prompt decoded in a batch."""

    sample_id: str
    cycles: list[int]
    identical: bool | None = None


class Evaluation(Read):
    """One drafter on one task."""

    drafter: str
    task: str
    block_size: int
    dtype: str
    max_new_tokens: int
    overall: Figures
    per_kind: dict[str, Figures]
    timed: list[Timed]
    responses: list[Response]


class LogLine(Read):
    """Averages over some training steps."""

    step: int
    epoch: float = 0.0
    loss: float
    accepted_by_position: float
    lr: float = 0.0
    labels_outside_head: int = 0
    seconds_per_step: float | None = None


class Training(Read):
    """What is known of a drafter's training."""

    name: str
    steps: int
    documents: int
    documents_without_block: int = 0
    documents_repeated: int = 0
    head_tokens: int | None = None
    weights: int | None = None
    settings: dict[str, Any] = {}
    history: list[LogLine]


class DFlashConfig(Read):
    mask_token_id: int
    target_layer_ids: list[int]


class ExportConfig(Read):
    """The published config.json of a drafter."""

    block_size: int
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float | None = None
    sliding_window: int | None = None
    dflash_config: DFlashConfig


class Target(Read):
    """The part of a target's identity that is shown."""

    model: str
    revision: str
    folder: str
    weights_sha256: str
    tokenizer_sha256: str
    chat_template_sha256: str
    architecture: str
    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    tie_word_embeddings: bool
    files: dict[str, int] = {}


@dataclass(frozen=True)
class Drafter:
    """All that is known of one drafter."""

    name: str
    look: int  # its place among the drafters: decides colour and marker
    training: Training
    config: ExportConfig
    export: Path
    export_bytes: int | None
    tasks: dict[str, Evaluation]

    @property
    def task(self) -> Evaluation:
        """The evaluation that the headline speaks of: the first one given."""
        return next(iter(self.tasks.values()))


@dataclass(frozen=True)
class Cost:
    """What all jobs of a stage took together."""

    jobs: int
    seconds: float
    peak_mb: float | None  # of the largest job; None where no job was long enough to be sampled


@dataclass(frozen=True)
class Inputs:
    """Everything the report is made from. Counts are lists of (source, statistics)."""

    target: Target
    corpus: list[tuple[str, dict[str, Any]]]
    tokens: list[tuple[str, dict[str, Any]]]
    features: list[tuple[str, dict[str, Any]]]
    drafters: list[Drafter]
    costs: dict[str, Cost]

    @property
    def tasks(self) -> list[str]:
        return list(self.drafters[0].tasks)


# --- reading ------------------------------------------------------------------------------------

R = TypeVar("R", bound=Read)
AGAIN = "delete it and run its stage again"


def read(model: type[R], path: str | Path) -> R:
    """A JSON file that another stage wrote. Raises UserError naming the first wrong field."""
    try:
        return model.model_validate(read_json(path))
    except ValidationError as e:
        fault = e.errors()[0]
        field = ".".join(str(part) for part in fault["loc"]) or "the whole file"
        raise UserError(f"{path}: {field}: {fault['msg'].lower()}; {AGAIN}") from None


def read_counts(path: str | Path) -> dict[str, Any]:
    """A JSON file of statistics. Raises UserError when it is not an object of finite numbers."""
    data = read_json(path)
    if not isinstance(data, dict):
        raise UserError(f"{path}: found {type(data).__name__}, expected an object; {AGAIN}")
    for key, value in data.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{path}: {key}: found {value}, expected a finite number; {AGAIN}")
    return data


def read_drafters(
    trainings: list[str], evaluations: list[str], exports: list[str]
) -> list[Drafter]:
    """The drafters in the order of their training files.

    Raises UserError when one lacks its export or a task's evaluation, or has one of them twice.
    """
    trained = _unique((t.name, path, t) for path in trainings for t in [read(Training, path)])
    configs = _unique((Path(p).parent.name, p, read(ExportConfig, p)) for p in exports)
    folders = {Path(p).parent.name: Path(p).parent for p in exports}
    read_evaluations = [(path, read(Evaluation, path)) for path in evaluations]
    measured = _unique((f"{e.drafter} on {e.task}", path, e) for path, e in read_evaluations)
    tasks = list(dict.fromkeys(e.task for e in measured.values()))
    if not tasks:
        raise UserError("--evaluations: no files; run the evaluate stage first")
    drafters = []
    for look, (name, training) in enumerate(trained.items()):
        missing = [t for t in tasks if f"{name} on {t}" not in measured]
        if missing:
            raise UserError(
                f"drafter {name} has no evaluation on task {', '.join(missing)}; run the evaluate "
                "stage for it and pass its file"
            )
        if name not in configs:
            raise UserError(f"drafter {name} has no export; run the export stage for it")
        weights = folders[name] / "model.safetensors"
        drafters.append(
            Drafter(
                name=name,
                look=look,
                training=training,
                config=configs[name],
                export=folders[name],
                export_bytes=weights.stat().st_size if weights.exists() else None,
                tasks={t: measured[f"{name} on {t}"] for t in tasks},
            )
        )
    return drafters


def _unique(items: Iterable[tuple[str, str, R]]) -> dict[str, R]:
    found: dict[str, R] = {}
    for name, path, value in items:
        if name in found:
            raise UserError(f"{path}: {name} was given twice; pass each file once")
        found[name] = value
    return found


def read_costs(folder: Path | None) -> dict[str, Cost]:
    """Time and memory of each stage, summed over its jobs' Snakemake benchmarks.

    Stages without a benchmark are left out. Raises UserError for a file without seconds.
    """
    costs = {}
    for stage in STAGES:
        files = sorted((folder / stage).rglob("*.tsv")) if folder else []
        rows = [row for path in files for row in _benchmark(path)]
        if rows:
            peaks = [peak for _, peak in rows if peak is not None]
            costs[stage] = Cost(len(rows), sum(s for s, _ in rows), max(peaks, default=None))
    return costs


def _benchmark(path: Path) -> list[tuple[float, float | None]]:
    """(seconds, peak memory in MB) of each row; a job too short to be sampled has no memory."""
    with open(path, newline="", encoding="utf-8") as f:
        rows = list(csv.DictReader(f, delimiter="\t"))
    try:
        found = [(float(row["s"]), _peak(row.get("max_rss"))) for row in rows]
    except (KeyError, TypeError, ValueError):
        found = []
    if not found or not all(math.isfinite(s) for s, _ in found):
        raise UserError(f"{path}: not a Snakemake benchmark (no seconds in column `s`); {AGAIN}")
    return found


def _peak(text: str | None) -> float | None:
    return None if text in (None, "", "NA", "-") else float(text)


# --- the summary --------------------------------------------------------------------------------


@dataclass(frozen=True)
class BreakEven:
    """What a cycle of drafting and verifying costs beside one plain step, on the timed prompts."""

    cycle_seconds: float
    plain_seconds: float  # per token
    tau_timed: float  # tokens a cycle gave there

    @property
    def tau(self) -> float:
        """Tokens a cycle must give for drafting to be as fast as plain decoding."""
        return self.cycle_seconds / self.plain_seconds


def break_even(e: Evaluation) -> BreakEven | None:
    """From the timed prompts; the cycles of each are those of the same prompt in its batch."""
    cycles_of = {r.sample_id: len(r.cycles) for r in e.responses}
    timed = [t for t in e.timed if cycles_of.get(t.sample_id)]
    cycles = sum(cycles_of[t.sample_id] for t in timed)
    plain_tokens = sum(t.plain_tokens - 1 for t in timed)  # the first token is the prefill's
    plain_seconds = sum(t.plain_seconds for t in timed)
    if not cycles or plain_tokens <= 0 or plain_seconds <= 0:
        return None
    return BreakEven(
        cycle_seconds=sum(t.drafted_seconds for t in timed) / cycles,
        plain_seconds=plain_seconds / plain_tokens,
        tau_timed=sum(t.drafted_tokens - 1 for t in timed) / cycles,
    )


def summarise(inputs: Inputs, report: str) -> dict[str, Any]:
    """What `summary.json` holds; `report` is the page's path as seen from there."""
    return {
        "target": inputs.target.model,
        "drafters": {d.name: _drafter_summary(d) for d in inputs.drafters},
        "stages": {stage: round(c.seconds, 4) for stage, c in inputs.costs.items()},
        "peak_memory_mb": {stage: c.peak_mb for stage, c in inputs.costs.items()},
        "sizes": sizes(inputs),
        "report": report,
    }


def _drafter_summary(d: Drafter) -> dict[str, Any]:
    first, point = d.task, break_even(d.task)
    history = d.training.history
    out = {
        "task": first.task,
        **first.overall.model_dump(mode="json"),
        "break_even_tau": point.tau if point else None,
        "block_size": d.config.block_size,
        "steps": d.training.steps,
        "final_loss": history[-1].loss if history else None,
        "export": str(d.export),
        "per_kind": {kind: f.model_dump(mode="json") for kind, f in first.per_kind.items()},
    }
    if len(d.tasks) > 1:
        out["tasks"] = {t: e.overall.model_dump(mode="json") for t, e in d.tasks.items()}
    return out


def sizes(inputs: Inputs) -> dict[str, Any]:
    """Amounts of data that went through the stages."""
    return {
        "target_bytes": sum(inputs.target.files.values()),
        "prompts": total(inputs.corpus, "kept"),
        "documents": total(inputs.tokens, "documents"),
        "tokens": total(inputs.tokens, "tokens"),
        "response_tokens": total(inputs.tokens, "response_tokens"),
        "feature_documents": total(inputs.features, "documents"),
        "feature_tokens": total(inputs.features, "tokens"),
        "feature_bytes": total(inputs.features, "bytes"),
        "drafter_weights": {d.name: d.training.weights for d in inputs.drafters},
        "export_bytes": {d.name: d.export_bytes for d in inputs.drafters},
    }


def total(statistics: list[tuple[str, dict[str, Any]]], key: str) -> int:
    """Sum of one count over all files that state it."""
    return sum(s[key] for _, s in statistics if isinstance(s.get(key), int))


class ShownDrafter(Figures):
    """A drafter in the summary."""

    task: str
    per_kind: dict[str, Figures]
    tasks: dict[str, Figures] = {}


class Summary(Read):
    """What the closing table needs of `summary.json`."""

    target: str
    drafters: dict[str, ShownDrafter]
    report: str


def closing_table(summary: Summary, folder: Path) -> str:
    """The table that ends a run, for a terminal of any encoding; `folder` holds the summary."""
    lines = [f"target {summary.target}"]
    for name, d in summary.drafters.items():
        rows = [*d.per_kind.items(), ("overall", d)]
        rows += [(f"overall, {t}", f) for t, f in d.tasks.items() if t != d.task]
        width = max(len(label) for label, _ in [("kind", None), *rows])
        lines += [
            "",
            f"drafter {name} on {d.task}",
            f"  {'kind':<{width}}  responses  tau mean  tau pooled  speed-up  checked  identical",
        ]
        for label, f in rows:
            lines.append(
                f"  {label:<{width}}  {f.responses:>9}  {number(f.tau_mean, dash='-'):>8}  "
                f"{number(f.tau_pooled, dash='-'):>10}  {number(f.speed_up, dash='-'):>8}  "
                f"{f.lossless.checked:>7}  {f.lossless.identical:>9}"
            )
        differ = sum(f.lossless.checked - f.lossless.identical for f in (d, *d.tasks.values()))
        if differ:
            lines.append("  WARNING: outputs differ from the target's own; the report names them")
    return "\n".join([*lines, "", f"report: {Path(os.path.normpath(folder / summary.report))}"])


# --- numbers as text ----------------------------------------------------------------------------


def number(x: float | None, digits: int = 2, dash: str = "–") -> str:
    """Fixed digits with thousands separators; a dash for what was not measured."""
    return dash if x is None else f"{x:,.{digits}f}"


def percent(x: float | None, digits: int = 0) -> str:
    return "–" if x is None else f"{100 * x:.{digits}f} %"


def times(x: float | None) -> str:
    return "–" if x is None else f"{x:.2f}×"


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours} h {m:02d} min" if hours else f"{m} min {s:02d} s"


def data_size(count: float | None) -> str:
    if count is None:
        return "–"
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}" if unit != "bytes" else f"{count} bytes"
        count /= 1000
    return f"{count:,.1f} TB"


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


# --- markup -------------------------------------------------------------------------------------


class Html(str):
    """Text that is markup already. Every other string is escaped when it becomes part of a page."""


EMPTY = {"meta", "rect", "line", "path", "polyline"}  # elements that never hold anything


def join(*parts: Any) -> Html:
    """Parts of a page one after the other: Html as it is, text escaped, lists flattened."""
    out = []
    for part in parts:
        if isinstance(part, Html):
            out.append(part)
        elif isinstance(part, list | tuple):
            out.append(join(*part))
        elif part is not None:
            out.append(html.escape(str(part)))
    return Html("".join(out))


def el(tag: str, *children: Any, **attributes: Any) -> Html:
    """An element. `class_` is class, `text_anchor` is text-anchor; None leaves an attribute out."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if tag in EMPTY:
        return Html(f"<{tag}{written}/>")
    return Html(f"<{tag}{written}>{join(*children)}</{tag}>")


def table(
    caption: str, head: Sequence[Any], rows: list[Sequence[Any]], numeric_from: int = 1
) -> Html:
    """A table whose first column heads its rows; columns from `numeric_from` on are numbers.

    A cell that is a `td` or `th` already is taken as it is; None is covered by a cell above.
    """

    def cell(i: int, value: Any) -> Any:
        if value is None or (isinstance(value, Html) and value.startswith(("<td", "<th"))):
            return value
        name = "n" if i >= numeric_from else None
        return el("td", value, class_=name) if i else el("th", value, scope="row")

    return el(
        "div",
        el(
            "table",
            el("caption", caption),
            el(
                "thead",
                el(
                    "tr",
                    [
                        el("th", h, scope="col", class_="n" if i >= numeric_from else None)
                        for i, h in enumerate(head)
                    ],
                ),
            ),
            el("tbody", [el("tr", [cell(i, v) for i, v in enumerate(row)]) for row in rows]),
        ),
        class_="scroll",
        tabindex="0",
        role="region",
        aria_label=caption,
    )


# --- drawing ------------------------------------------------------------------------------------

WIDTH, HEIGHT = 380, 230  # of a chart, in its own units; text is 11 of them high
LOOKS = 6  # colours; markers have another period, so that 30 drafters differ
MARKERS = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",  # circle
    "M-3.6-3.6h7.2v7.2h-7.2z",  # square
    "M0-4.8L4.6 3.4H-4.6z",  # triangle
    "M0-5.2L5.2 0L0 5.2L-5.2 0z",  # diamond
    "M-1.5-4.5h3v3h3v3h-3v3h-3v-3h-3v-3h3z",  # cross
)


@dataclass(frozen=True)
class Series:
    """One drafter's points of a chart."""

    name: str
    look: int
    points: list[tuple[float, float]]


@dataclass(frozen=True)
class Frame:
    """Where data lies in a drawing: the data's ranges, and the pixels they fill."""

    x: tuple[float, float]
    y: tuple[float, float]
    left: float = 42
    right: float = WIDTH - 14
    top: float = 24
    bottom: float = HEIGHT - 34

    def px(self, x: float) -> float:
        low, high = self.x
        return round(self.left + (x - low) / (high - low) * (self.right - self.left), 1)

    def py(self, y: float) -> float:
        low, high = self.y
        return round(self.bottom - (y - low) / (high - low) * (self.bottom - self.top), 1)


def ticks(low: float, high: float, about: int = 5, smallest: float = 0.0) -> list[float]:
    """Round numbers, about so many, that enclose a range; never closer than `smallest`."""
    if high <= low:
        low, high = low - 0.5, high + 0.5
    step = max((high - low) / about, smallest)
    power = 10.0 ** math.floor(math.log10(step))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= step * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 10) for i in range(first, last + 1)]


def marker(look: int, x: float, y: float, title: str | None = None, hollow: bool = False) -> Html:
    """A drafter's mark at a place; the title shows when pointed at."""
    shape = el("path", d=MARKERS[look % len(MARKERS)], class_="hollow" if hollow else "dot")
    label = el("title", title) if title else None
    return el("g", label, shape, class_=f"s{look % LOOKS}", transform=f"translate({x} {y})")


def horizontal_axis(frame: Frame, at: Iterable[float], title: str, grid: bool = False) -> Html:
    """Tick labels below the frame, the title at their right end."""
    parts = []
    for t in at:
        x = frame.px(t)
        if grid:
            parts.append(el("line", x1=x, x2=x, y1=frame.top, y2=frame.bottom, class_="grid"))
        parts.append(el("text", f"{t:g}", x=x, y=frame.bottom + 14, text_anchor="middle"))
    end = el("text", title, x=frame.right, y=frame.bottom + 29, text_anchor="end", class_="axis")
    return join(parts, end)


def vertical_axis(frame: Frame, at: Iterable[float], title: str, share: bool = False) -> Html:
    """Grid lines with labels at the left, the title above them."""
    parts = []
    for t in at:
        y = frame.py(t)
        text = f"{100 * t:g} %" if share else f"{t:g}"
        parts.append(el("line", x1=frame.left, x2=frame.right, y1=y, y2=y, class_="grid"))
        parts.append(el("text", text, x=frame.left - 6, y=y + 4, text_anchor="end"))
    return join(parts, el("text", title, x=2, y=11, class_="axis"))


def figure(
    title: str, drawing: list[Html], names: list[tuple[str, int]], note: Any = None, height=HEIGHT
) -> Html:
    """A drawing with its title, a legend if it shows several drafters, and a note."""
    legend = [el("li", _legend_mark(look), name) for name, look in names]
    return el(
        "figure",
        el("figcaption", title),
        el("ul", legend, class_="legend") if len(names) > 1 else None,
        el(
            "svg",
            el("title", title),
            drawing,
            viewBox=f"0 0 {WIDTH} {height}",
            role="img",
            xmlns="http://www.w3.org/2000/svg",
        ),
        el("p", note, class_="note") if note else None,
    )


def _legend_mark(look: int) -> Html:
    return el("svg", marker(look, 7, 7), viewBox="0 0 14 14", class_="mark", aria_hidden="true")


def thin(points: list[tuple[float, float]], most: int = 240) -> list[tuple[float, float]]:
    """At most so many points: means of equal groups of neighbours, placed at the group's end."""
    size = math.ceil(len(points) / most) if points else 1
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [(g[-1][0], sum(y for _, y in g) / len(g)) for g in groups]


def line_chart(
    title: str,
    series: list[Series],
    x_title: str,
    y_title: str,
    share: bool = False,
    every_mark: bool = False,
    note: Any = None,
) -> Html:
    """Curves. Marks at every point, or at a few (one drafter: at its end), with the last value."""
    series = [s for s in series if s.points]
    if not series:
        return figure(title, [], [], "Nothing to draw: no values.", height=1)
    xs = [x for s in series for x, _ in s.points]
    ys = [y for s in series for _, y in s.points]
    low, high = (min(xs), max(xs)) if max(xs) > min(xs) else (min(xs) - 1, max(xs) + 1)
    y_ticks = ticks(0 if share else min(ys), max(ys))
    right = WIDTH - (14 if every_mark else 44)  # room for the last value
    frame = Frame((low, high), (y_ticks[0], y_ticks[-1]), right=right)
    x_ticks = [t for t in ticks(low, high, 7, smallest=1) if low <= t <= high]
    drawing = [
        vertical_axis(frame, y_ticks, y_title, share),
        horizontal_axis(frame, x_ticks, x_title),
    ]
    for s in series:
        at = [(frame.px(x), frame.py(y)) for x, y in s.points]
        path = " ".join(f"{x},{y}" for x, y in at)
        drawing.append(el("polyline", points=path, class_=f"line s{s.look % LOOKS}"))
        step = 1 if every_mark else max(1, len(at) // 6 if len(series) > 1 else len(at))
        for i in range(len(at) - 1, -1, -step):
            x, y = s.points[i]
            value = percent(y, 1) if share else number(y, 3)
            drawing.append(marker(s.look, *at[i], title=f"{s.name}: {value} at {x_title} {x:g}"))
    if not every_mark:
        drawing += _end_values(frame, series)
    return figure(title, drawing, [(s.name, s.look) for s in series], note)


def _end_values(frame: Frame, series: list[Series]) -> list[Html]:
    """The last value of each curve beside its end, moved down where they would overlap."""
    parts, above = [], -math.inf
    for s in sorted(series, key=lambda s: -s.points[-1][1]):
        x, value = s.points[-1]
        above = max(frame.py(value), above + 12)
        look = f"value end s{s.look % LOOKS}"
        parts.append(el("text", number(value), x=frame.px(x) + 8, y=above + 4, class_=look))
    return parts


def bar_chart(title: str, series: list[Series], x_title: str, y_title: str, note: Any) -> Html:
    """Shares as groups of bars, one group for each whole number on the x axis."""
    series = [s for s in series if s.points]
    if not series:
        return figure(title, [], [], "Nothing to draw: no values.", height=1)
    last = max(x for s in series for x, y in s.points if y > 0)  # what never occurred needs no room
    y_ticks = ticks(0, max(y for s in series for _, y in s.points))
    frame = Frame((0.5, last + 0.5), (0, y_ticks[-1]))
    x_ticks = [t for t in ticks(1, last, 16, smallest=1) if 1 <= t <= last]
    drawing = [
        vertical_axis(frame, y_ticks, y_title, True),
        horizontal_axis(frame, x_ticks, x_title),
    ]
    width = 0.8 * (frame.px(1.5) - frame.px(0.5)) / len(series)
    for i, s in enumerate(series):
        for x, y in s.points[: int(last)]:
            left = frame.px(x - 0.4) + i * width
            top = frame.py(y)
            bar = el(
                "rect",
                x=round(left, 1),
                y=top,
                width=round(width * 0.92, 1),
                height=round(frame.bottom - top, 1),
                class_="bar",
            )
            hint = el("title", f"{s.name}: {x:g} tokens in {percent(y, 1)} of the cycles")
            drawing.append(el("g", hint, bar, class_=f"s{s.look % LOOKS}"))
            middle = round(left + width * 0.46, 1)
            if y > 0 and len(series) > 1:
                drawing.append(marker(s.look, middle, round(top - 6, 1)))
            elif y > 0 and last <= 10:
                text = percent(y) if y >= 0.005 else "<1 %"
                drawing.append(el("text", text, x=middle, y=top - 4, text_anchor="middle"))
    return figure(title, drawing, [(s.name, s.look) for s in series], note)


@dataclass(frozen=True)
class Dot:
    """A drafter's value in a row of a dot chart, perhaps with an interval and a second value."""

    name: str
    look: int
    value: float | None
    interval: tuple[float, float] | None = None
    second: float | None = None


def dot_chart(title: str, rows: list[tuple[str, list[Dot]]], x_title: str, note: Any) -> Html:
    """Rows of values on one scale, with a line at 1."""
    values = [
        v
        for _, dots in rows
        for d in dots
        for v in (d.value, d.second, *(d.interval or ()))
        if v is not None
    ]
    if not values:
        return figure(title, [], [], "Nothing to draw: not measured.", height=1)
    room = 0.04 * (max(1.0, *values) - min(1.0, *values))  # so that no mark sits on the edge
    at = ticks(min(1.0, min(values) - room), max(1.0, max(values) + room))
    row_height = 12 + 12 * len(rows[0][1])
    label_width = min(150, 26 + 6 * max(len(label) for label, _ in rows))
    frame = Frame(
        (at[0], at[-1]), (0, 1), left=label_width, top=6, bottom=6 + row_height * len(rows)
    )
    one = frame.px(1)
    drawing = [
        horizontal_axis(frame, at, x_title, grid=True),
        el("line", x1=one, x2=one, y1=frame.top, y2=frame.bottom, class_="one"),
    ]
    for i, (label, dots) in enumerate(rows):
        top = frame.top + i * row_height
        drawing.append(_row_label(label, frame.left - 10, top + row_height / 2 + 4))
        for k, dot in enumerate(dots):
            drawing += _dot(frame, dot, top + 12 + 12 * k, label)
    names = [(d.name, d.look) for d in rows[0][1]]
    return figure(title, drawing, names, note, height=round(frame.bottom + 36))


def _row_label(label: str, x: float, y: float, most: int = 22) -> Html:
    short = label if len(label) <= most else label[: most - 1] + "…"
    strong = "value" if label == OVERALL else None
    return el("text", el("title", label), short, x=x, y=y, text_anchor="end", class_=strong)


def _dot(frame: Frame, dot: Dot, y: float, label: str) -> list[Html]:
    parts = []
    where = f"{dot.name}, {label}: "
    if dot.interval:
        x1, x2 = map(frame.px, dot.interval)
        whisker = el("line", x1=x1, x2=x2, y1=y, y2=y, class_="whisker")
        parts.append(el("g", whisker, class_=f"s{dot.look % LOOKS}"))
    if dot.second is not None:
        title = f"{where}{number(dot.second, 3)} pooled"
        parts.append(marker(dot.look, frame.px(dot.second), y, title, hollow=True))
    if dot.value is not None:
        parts.append(marker(dot.look, frame.px(dot.value), y, where + number(dot.value, 3)))
    return parts


# --- the page -----------------------------------------------------------------------------------

OVERALL = "overall"


def page(inputs: Inputs) -> str:
    """The whole report."""
    plural_s = "" if len(inputs.drafters) == 1 else "s"
    title = f"DFlash drafter{plural_s} for {inputs.target.model}"
    several = len(inputs.tasks) > 1
    body = [
        el(
            "header",
            el("h1", title),
            el(
                "p",
                "A drafter proposes the next tokens; the target checks them all in one pass and "
                "keeps those it would have chosen itself. What that gives was measured by really "
                "decoding prompts that training never saw.",
                class_="lead",
            ),
        ),
        [warning(d, e) for d in inputs.drafters for e in d.tasks.values()],
        el("section", [headline(d, several) for d in inputs.drafters], class_="cards"),
        [task_section(inputs, task, several) for task in inputs.tasks],
        training_section(inputs),
        cost_section(inputs),
        counts_section(inputs),
        drafters_section(inputs),
        target_section(inputs.target),
        serving_section(inputs),
        reading_section(),
    ]
    head = [
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("title", title),
        el("style", Html(STYLE)),
    ]
    return "<!DOCTYPE html>\n" + el(
        "html", el("head", head), el("body", el("main", body)), lang="en"
    )


def warning(d: Drafter, e: Evaluation) -> Html | None:
    """Says which outputs differ from the target's own, if any do."""
    different = [r.sample_id for r in e.responses if r.identical is False]
    lossless = e.overall.lossless
    count = max(len(different), lossless.checked - lossless.identical)
    if not count:
        return None
    return el(
        "section",
        el(
            "h2",
            f"Warning: {plural(count, 'output')} of {d.name} on {e.task} "
            f"{'differs' if count == 1 else 'differ'} from the target's own",
        ),
        el(
            "p",
            f"{lossless.identical} of {lossless.checked} outputs checked in {e.dtype} are "
            "identical. Drafting must not change what the target says: do not serve this before "
            "the reason is known. A tie between two nearly equal tokens is the harmless one.",
        ),
        el("p", "Samples: ", [join(el("code", s), " ") for s in different]) if different else None,
        class_="warning",
        role="alert",
    )


def headline(d: Drafter, name_task: bool) -> Html:
    """A drafter's main figures, and what they mean in words."""
    e, f = d.task, d.task.overall
    same = f"{f.lossless.identical} of {f.lossless.checked}" if f.lossless.checked else "–"
    key_figures = [
        (number(f.tau_mean), "τ mean"),
        (number(f.tau_pooled), "τ pooled"),
        (times(f.speed_up), "speed-up"),
        (same, "outputs identical"),
    ]
    return el(
        "article",
        el("h2", _legend_mark(d.look), d.name, el("small", f" on {e.task}") if name_task else None),
        el(
            "dl",
            [el("div", el("dt", label), el("dd", value)) for value, label in key_figures],
            class_="key",
        ),
        el("p", el("strong", _tau_words(f)), " ", _pooled_words(f, e.block_size)),
        el("p", _speed_words(f), " ", _lossless_words(f)),
        _break_even_words(e),
        class_=f"card s{d.look % LOOKS}",
    )


def _tau_words(f: Figures) -> str:
    if f.tau_mean is None:
        return "Every response ended with its first token, so there was nothing to draft."
    interval = f.tau_mean_interval
    words = f" (95 % interval {number(interval[0])} to {number(interval[1])})" if interval else ""
    tokens = number(f.tau_mean) + " tokens" + words
    return f"Each pass of the target yields {tokens}; plain decoding yields 1."


def _pooled_words(f: Figures, block: int) -> str | None:
    if f.tau_mean is None:
        return None
    return (
        f"That is the mean over {plural(f.responses, 'response')} of each one's own mean; over all "
        f"{plural(f.cycles, 'cycle')} together it is {number(f.tau_pooled)}. "
        f"A block allows {block} at most."
    )


def _speed_words(f: Figures) -> str:
    if f.speed_up is None:
        return "The speed was not measured."
    if f.speed_up >= 1:
        return (
            f"One prompt at a time, decoding is {f.speed_up:.2f} times as fast with it as without."
        )
    return (
        f"One prompt at a time, decoding with it runs at {f.speed_up:.2f} times the speed of "
        "decoding without: on this machine it does not pay yet."
    )


def _lossless_words(f: Figures) -> str:
    checked, same = f.lossless.checked, f.lossless.identical
    if not checked:
        return "Outputs were not compared with the target's own: that needs float32."
    if same == checked:
        return f"All {plural(checked, 'output')} checked are identical to the target's own."
    return f"Only {same} of {checked} outputs are identical to the target's own: see the warning."


def _break_even_words(e: Evaluation) -> Html | None:
    point, share = break_even(e), e.overall.draft_share
    if point is None:
        return None
    drafting = f", {percent(share)} of it drafting" if share is not None else ""
    beyond = f", more than a block of {e.block_size} can yield" if point.tau > e.block_size else ""
    slow = e.overall.speed_up is not None and e.overall.speed_up < 1
    return el(
        "p",
        f"A cycle takes {1000 * point.cycle_seconds:.1f} ms{drafting}; a plain step of the target "
        f"takes {1000 * point.plain_seconds:.1f} ms. Drafting breaks even at τ = "
        f"{number(point.tau)}{beyond}; the timed prompts reached {number(point.tau_timed)}.",
        class_=None if slow else "note",
    )


def task_section(inputs: Inputs, task: str, name_task: bool) -> Html:
    """Acceptance and speed on one task: by kind of prompt, by slot, by cycle."""
    evaluations = [(d, d.tasks[task]) for d in inputs.drafters]
    first = evaluations[0][1]
    timed = max(len(e.timed) for _, e in evaluations)
    return el(
        "section",
        el("h2", "Acceptance and speed" + (f" on {task}" if name_task else "")),
        el(
            "p",
            f"{plural(len(first.responses), 'prompt')}, at most {first.max_new_tokens} new tokens, "
            f"greedy, in {first.dtype}; the speed on {timed} of them, decoded one at a time.",
        ),
        kind_table(evaluations),
        el(
            "div",
            kind_chart(
                "Tokens a pass of the target (τ) by kind",
                evaluations,
                lambda d, f: Dot(d.name, d.look, f.tau_mean, f.tau_mean_interval, f.tau_pooled),
                "τ",
                "Filled: mean over responses, with its 95 % interval. Hollow: pooled over cycles.",
            ),
            kind_chart(
                "Speed-up by kind",
                evaluations,
                lambda d, f: Dot(d.name, d.look, f.speed_up),
                "times plain decoding",
                "Right of 1 the drafter makes decoding faster. Few prompts of each kind are timed.",
            ),
            slot_chart(evaluations),
            gained_chart(evaluations),
            class_="charts",
        ),
    )


def _kinds(evaluations: list[tuple[Drafter, Evaluation]]) -> list[str]:
    return list(dict.fromkeys(kind for _, e in evaluations for kind in e.per_kind))


def kind_table(evaluations: list[tuple[Drafter, Evaluation]]) -> Html:
    """One row for each kind and drafter."""
    several = len(evaluations) > 1
    rows = []
    for kind in [*_kinds(evaluations), OVERALL]:
        found = [
            (d, e.overall if kind == OVERALL else e.per_kind.get(kind)) for d, e in evaluations
        ]
        found = [(d, f) for d, f in found if f is not None]
        for i, (d, f) in enumerate(found):
            span = str(len(found)) if several else None
            name = el("th", kind, scope="row", rowspan=span) if i == 0 else None
            rows.append([name, *([d.name] if several else []), *_kind_cells(f)])
    head = ["Kind", *(["Drafter"] if several else []), "Responses", "τ mean", "95 % interval"]
    head += ["τ pooled", "Speed-up", "Identical"]
    return table("Acceptance and speed by kind of prompt", head, rows, 2 if several else 1)


def _kind_cells(f: Figures) -> list[str]:
    low_high = f.tau_mean_interval
    return [
        f"{f.responses:,}",
        number(f.tau_mean),
        f"{number(low_high[0])} – {number(low_high[1])}" if low_high else "–",
        number(f.tau_pooled),
        times(f.speed_up),
        f"{f.lossless.identical} of {f.lossless.checked}" if f.lossless.checked else "–",
    ]


def kind_chart(
    title: str,
    evaluations: list[tuple[Drafter, Evaluation]],
    dot: Callable[[Drafter, Figures], Dot],
    x_title: str,
    note: str,
) -> Html:
    """A figure of every kind as dots, the overall one below."""
    rows = []
    for kind in _kinds(evaluations):
        dots = [
            dot(d, e.per_kind[kind]) if kind in e.per_kind else Dot(d.name, d.look, None)
            for d, e in evaluations
        ]
        rows.append((kind, dots))
    rows.append((OVERALL, [dot(d, e.overall) for d, e in evaluations]))
    return dot_chart(title, rows, x_title, note)


def slot_chart(evaluations: list[tuple[Drafter, Evaluation]]) -> Html:
    series = [
        Series(d.name, d.look, [(float(k), share) for k, share in enumerate(e.overall.per_slot, 1)])
        for d, e in evaluations
    ]
    return line_chart(
        "Acceptance per slot",
        series,
        "slot",
        "share of cycles in which the slot was accepted",
        share=True,
        every_mark=True,
        note="Slot 1 is the first drafted token. One plus the sum of all shares is τ pooled.",
    )


def gained_chart(evaluations: list[tuple[Drafter, Evaluation]]) -> Html:
    series, most = [], 0
    for d, e in evaluations:
        cycles = [gained for r in e.responses for gained in r.cycles]
        at = range(1, e.block_size + 1) if cycles else []
        shares = [(float(k), cycles.count(k) / len(cycles)) for k in at]
        series.append(Series(d.name, d.look, shares))
        most = max([most, *cycles])
    return bar_chart(
        "Tokens gained in a cycle",
        series,
        "tokens",
        "share of cycles",
        f"One token means that nothing drafted was accepted. No cycle gained more than {most}.",
    )


def training_section(inputs: Inputs) -> Html:
    """The two curves over steps."""

    def curve(value: Callable[[LogLine], float]) -> list[Series]:
        return [
            Series(d.name, d.look, thin([(h.step, value(h)) for h in d.training.history]))
            for d in inputs.drafters
        ]

    return el(
        "section",
        el("h2", "Training"),
        el(
            "div",
            line_chart("Loss", curve(lambda h: h.loss), "step", "weighted cross-entropy"),
            line_chart(
                "Accepted by position",
                curve(lambda h: h.accepted_by_position),
                "step",
                "tokens",
                note="Averaged over training positions: an indication, not τ.",
            ),
            class_="charts",
        ),
    )


def cost_section(inputs: Inputs) -> Html:
    """Where time and space went."""
    return el(
        "section",
        el("h2", "Time and size"),
        el("div", _time_table(inputs.costs), _size_table(inputs), class_="pair"),
    )


def _time_table(costs: dict[str, Cost]) -> Html:
    if not costs:
        return el("p", "No times were recorded.")
    whole = sum(c.seconds for c in costs.values())
    rows = []
    for stage, c in costs.items():
        share = c.seconds / whole if whole else 0.0
        bar = el("span", el("span", style=f"width:{100 * share:.1f}%"), class_="track")
        memory = data_size(c.peak_mb * 1e6) if c.peak_mb is not None else "–"
        rows.append(
            [
                stage,
                c.jobs,
                duration(c.seconds),
                [bar, el("span", percent(share), class_="share")],
                memory,
            ]
        )
    rows.append(["all", sum(c.jobs for c in costs.values()), duration(whole), "", ""])
    head = ["Stage", "Jobs", "Time", "Share", "Peak memory"]
    note = "Times are added over jobs, also those that ran at once. Memory is the largest job's."
    return el("div", table("Time by stage", head, rows), el("p", note, class_="note"))


def _size_table(inputs: Inputs) -> Html:
    s = sizes(inputs)
    rows = [
        ["target, files on disk", data_size(s["target_bytes"])],
        ["prompts kept", f"{s['prompts']:,}"],
        ["documents answered", f"{s['documents']:,}"],
        ["tokens of prompts and answers", f"{s['tokens']:,}"],
        ["of these the target's own", f"{s['response_tokens']:,}"],
        ["documents with hidden states", f"{s['feature_documents']:,}"],
        ["tokens with hidden states", f"{s['feature_tokens']:,}"],
        ["hidden states on disk", data_size(s["feature_bytes"])],
    ]
    for d in inputs.drafters:
        rows.append([f"drafter {d.name}, exported", data_size(d.export_bytes)])
    return table("Sizes", ["What", "Size"], rows)


# Names of the counts that stages write; others are shown by their own names.
LABELS = {
    "corpus": {
        "rows": "rows read",
        "kept": "prompts kept",
        "duplicates": "dropped: the same prompt again",
        "too_long": "dropped: longer than corpus.max_prompt_tokens",
        "trailing_replies_dropped": "replies in the data not used: the target answers itself",
    },
    "regenerate": {
        "documents": "prompts answered",
        "tokens": "tokens of prompts and answers",
        "response_tokens": "tokens of answers",
        "responses_below_2_tokens": "answers of fewer than 2 tokens",
    },
    "extract": {
        "documents": "documents stored",
        "tokens": "tokens stored",
        "supervised_tokens": "tokens to learn from",
        "documents_cut": "cut at extract.max_tokens",
        "documents_too_short": "dropped: too short for a block",
        "documents_without_supervision": "dropped: nothing to learn from",
    },
}
NO_COUNTS = {"extract": ("hidden_size", "bytes")}  # numbers in its files that count nothing


def counts_section(inputs: Inputs) -> Html:
    """What came in, and what was left out on the way; all counts of all stages."""
    groups = [
        ("corpus", _count_rows("corpus", inputs.corpus)),
        ("regenerate", _count_rows("regenerate", inputs.tokens)),
        ("extract", _count_rows("extract", inputs.features)),
        *((f"train {d.name}", _training_counts(d.training)) for d in inputs.drafters),
    ]
    rows: list[list[Any]] = []
    for stage, counts in groups:
        for i, (label, count, by_source) in enumerate(counts):
            name = el("th", stage, scope="rowgroup", rowspan=len(counts)) if i == 0 else None
            what = [label, el("div", by_source, class_="note")] if by_source else label
            rows.append([name, what, f"{count:,}"])
    return el(
        "section",
        el("h2", "What was used and what was dropped"),
        el(
            "div",
            table("All counts", ["Stage", "What", "Count"], rows, 2),
            _kinds_table(inputs.corpus),
            class_="pair",
        ),
    )


Count = tuple[str, int, str]  # what, how many, the same by source


def _training_counts(t: Training) -> list[Count]:
    return [
        ("documents used", t.documents, ""),
        ("dropped: without a block to learn from", t.documents_without_block, ""),
        ("dropped: repeated in another source", t.documents_repeated, ""),
        ("labels outside the reduced head", sum(h.labels_outside_head for h in t.history), ""),
    ]


def _count_rows(stage: str, files: list[tuple[str, dict[str, Any]]]) -> list[Count]:
    """Every whole number in a stage's statistics, summed over its shards."""
    keys = dict.fromkeys(LABELS[stage]) | dict.fromkeys(k for _, s in files for k in s)
    sources = list(dict.fromkeys(source for source, _ in files))
    rows = []
    for key in keys:
        stated = [s[key] for _, s in files if type(s.get(key)) is int]
        if not stated or key in NO_COUNTS.get(stage, ()):
            continue
        each = [(name, total([x for x in files if x[0] == name], key)) for name in sources]
        by_source = ", ".join(f"{name} {count:,}" for name, count in each) if len(each) > 1 else ""
        label = LABELS[stage].get(key, key.replace("_", " "))
        rows.append((label, sum(stated), by_source))
    ended = [
        (s["documents"], s["ended_share"])
        for _, s in files
        if {"documents", "ended_share"} <= s.keys()
    ]
    if ended:
        cut = sum(round(n * (1 - share)) for n, share in ended)
        rows.append(("answers cut at regenerate.max_new_tokens", cut, ""))
    return rows


def _kinds_table(corpus: list[tuple[str, dict[str, Any]]]) -> Html | None:
    """Prompts of each kind, for training and held out."""
    counts: dict[str, dict[str, int]] = {}
    for _, statistics in corpus:
        for split, kinds in (statistics.get("kinds") or {}).items():
            for kind, n in kinds.items():
                row = counts.setdefault(kind, {})
                row[split] = row.get(split, 0) + n
    if not counts:
        return None
    rows = [
        [kind, f"{row.get('train', 0):,}", f"{row.get('heldout', 0):,}"]
        for kind, row in sorted(counts.items())
    ]
    return table("Prompts by kind", ["Kind", "Training", "Held out"], rows)


def drafters_section(inputs: Inputs) -> Html:
    """Shape and settings of the drafters, side by side."""
    columns = [_drafter_facts(d) for d in inputs.drafters]
    rows = [
        [fact, *(column.get(fact, "–") for column in columns)]
        for fact in dict.fromkeys(fact for column in columns for fact in column)
    ]
    return el(
        "section",
        el("h2", "Drafter" if len(columns) == 1 else "Drafters"),
        table("Shape and training", ["What", *(d.name for d in inputs.drafters)], rows),
    )


def _drafter_facts(d: Drafter) -> dict[str, str]:
    c, t = d.config, d.training
    last = t.history[-1] if t.history else None
    facts = {
        "block size (slots)": str(c.block_size),
        "layers": str(c.num_hidden_layers),
        "tapped target layers": ", ".join(map(str, c.dflash_config.target_layer_ids)),
        "mask token": str(c.dflash_config.mask_token_id),
        "hidden and MLP width": f"{c.hidden_size:,} and {c.intermediate_size:,}",
        "query heads, key/value heads, width": (
            f"{c.num_attention_heads}, {c.num_key_value_heads}, {c.head_dim}"
        ),
        "rotary base": number(c.rope_theta, 0),
        "sliding window": number(c.sliding_window, 0, dash="none"),
        "weights": number(t.weights, 0),
        "training steps": f"{t.steps:,}",
        "epochs": number(last.epoch if last else None),
        "tokens in the head while training": number(t.head_tokens, 0),
        "final loss": number(last.loss if last else None, 3),
        "seconds a step": number(last.seconds_per_step if last else None),
    }
    return facts | {f"setting {key}": value for key, value in _flat(t.settings).items()}


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as dotted names; what was left to its default of null is left out."""
    out: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            out |= _flat(value, f"{prefix}{key}.")
        elif value is not None:
            out[prefix + key] = value if isinstance(value, str) else json.dumps(value)
    return out


def target_section(t: Target) -> Html:
    """What the target is, in full."""

    def short(digest: str) -> Html:
        return el("code", digest[:12], title=digest)

    rows = [
        ["model", t.model],
        ["revision", t.revision],
        ["folder", el("code", t.folder)],
        ["architecture", t.architecture],
        ["layers, width", f"{t.num_hidden_layers}, {t.hidden_size:,}"],
        ["query heads, key/value heads", f"{t.num_attention_heads}, {t.num_key_value_heads}"],
        ["vocabulary", f"{t.vocab_size:,}"],
        ["head", "the embedding table" if t.tie_word_embeddings else "its own"],
        ["weights SHA-256", short(t.weights_sha256)],
        ["tokenizer SHA-256", short(t.tokenizer_sha256)],
        ["chat template SHA-256", short(t.chat_template_sha256)],
    ]
    return el(
        "section",
        el("h2", "Target"),
        table("Identity of the target", ["What", "Value"], rows, numeric_from=2),
    )


def serving_section(inputs: Inputs) -> Html:
    """Launch lines with the right numbers for each drafter."""
    parts = []
    for d in inputs.drafters:
        for engine, command in launch_lines(inputs.target, d):
            parts += [el("h3", f"{engine}, {d.name}"), el("pre", el("code", command), tabindex="0")]
    return el(
        "section",
        el("h2", "How to serve it"),
        el("p", "Run these where the workflow ran; elsewhere, give full paths."),
        parts,
    )


def launch_lines(t: Target, d: Drafter) -> list[tuple[str, str]]:
    """(engine, command). vLLM counts the drafted tokens, SGLang the whole block."""
    model, block = shlex.quote(t.folder), d.config.block_size
    vllm = {"method": "dflash", "model": str(d.export), "num_speculative_tokens": block - 1}
    return [
        (
            "vLLM",
            f"vllm serve {model} \\\n"
            f"  --speculative-config {shlex.quote(json.dumps(vllm, separators=(',', ':')))}",
        ),
        (
            "SGLang",
            f"python -m sglang.launch_server --model-path {model} \\\n"
            f"  --speculative-algorithm DFLASH \\\n"
            f"  --speculative-draft-model-path {shlex.quote(str(d.export))} \\\n"
            f"  --speculative-num-draft-tokens {block}",
        ),
    ]


def reading_section() -> Html:
    """What the figures are, for comparing them with others."""
    terms = [
        (
            "τ, acceptance length",
            "Tokens a cycle of drafting and verifying gives, from 1 to the block size. The "
            "target's own next token is counted, the first token (from reading the prompt) is not. "
            "Published figures are the mean over responses; the pooled figure is usually lower, "
            "because responses that draft badly take more cycles.",
        ),
        (
            "Speed-up",
            "Seconds per token without the drafter over seconds per token with it, in the same "
            "decoding loop, one prompt at a time, reading of the prompt left out. It belongs to "
            "the machine it was measured on.",
        ),
        (
            "Identical",
            "The output equals the target's own greedy output token by token. Only float32 allows "
            "the comparison: in bfloat16 nearly equal tokens may change places.",
        ),
        (
            "95 % interval",
            "Of the mean over responses, by drawing responses with replacement (bootstrap).",
        ),
    ]
    return el(
        "section",
        el("h2", "How to read the figures"),
        el("dl", [join(el("dt", term), el("dd", words)) for term, words in terms], class_="terms"),
    )


# Colours: Okabe and Ito's, which colour-blind readers can tell apart; lighter ones on dark.
STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1b2026; --soft: #5a646f; --rule: #dde1e6;
  --wash: #f5f6f8; --alarm: #a3200d; --alarm-wash: #fdf0ee; --c0: #0072b2; --c1: #d55e00;
  --c2: #008f68; --c3: #b0558a; --c4: #5b6570; --c5: #a07400; }
@media screen and (prefers-color-scheme: dark) { :root { --paper: #14171b; --ink: #e6e9ec;
  --soft: #a2abb5; --rule: #333a42; --wash: #1c2127; --alarm: #ff9d8c; --alarm-wash: #321a17;
  --c0: #56b4e9; --c1: #f08a3c; --c2: #2fc79b; --c3: #e39bc4; --c4: #b4bdc7; --c5: #e0b63a; } }
.s0 { --c: var(--c0); } .s1 { --c: var(--c1); } .s2 { --c: var(--c2); }
.s3 { --c: var(--c3); } .s4 { --c: var(--c4); } .s5 { --c: var(--c5); }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); line-height: 1.5;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 66rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .6rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 0 0 .6rem; overflow-wrap: anywhere; }
h3 { font-size: .95rem; margin: 1rem 0 .3rem; }
h2 small { font-weight: normal; color: var(--soft); }
p { margin: 0 0 .7rem; max-width: 46rem; }
.lead { color: var(--soft); }
.note { color: var(--soft); font-size: .85rem; margin: .3rem 0 0; }
section { margin-top: 2.75rem; }
.cards { display: grid; gap: 1.25rem; margin-top: 1.5rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 19rem), 1fr)); }
.card { background: var(--wash); border-top: 3px solid var(--c); border-radius: 4px;
  padding: 1.1rem 1.25rem; }
.key { display: grid; gap: .8rem 1rem; margin: 0 0 1rem; max-width: 46rem;
  grid-template-columns: repeat(auto-fit, minmax(8.2rem, 1fr)); }
.key div { display: flex; flex-direction: column-reverse; }
.key dt { color: var(--soft); font-size: .82rem; }
.key dd { margin: 0; font-size: 1.75rem; line-height: 1.15; font-weight: 600;
  font-variant-numeric: tabular-nums; }
.warning { border: 2px solid var(--alarm); background: var(--alarm-wash); border-radius: 4px;
  padding: 1rem 1.25rem; margin-top: 1.5rem; }
.warning h2 { color: var(--alarm); }
.scroll { overflow-x: auto; margin: 0 0 1.25rem; }
table { border-collapse: collapse; font-size: .9rem; }
caption { text-align: left; font-weight: 600; padding: 0 0 .4rem; white-space: nowrap; }
th, td { text-align: left; vertical-align: baseline; padding: .3rem 1.1rem .3rem 0;
  border-bottom: 1px solid var(--rule); }
thead th { color: var(--soft); font-weight: 500; vertical-align: bottom; }
tbody th { font-weight: 500; }
td code { overflow-wrap: anywhere; }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.track { display: inline-block; width: 5rem; margin-right: .6rem; background: var(--wash); }
.share { display: inline-block; min-width: 3.2em; }
.track span { display: block; height: .7rem; background: var(--c0); min-width: 1px; }
.track, .track span, .card, .warning { print-color-adjust: exact;
  -webkit-print-color-adjust: exact; }
.charts { display: grid; gap: 2rem 2.5rem; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); }
.pair { display: flex; flex-wrap: wrap; gap: 1rem 4rem; align-items: flex-start; }
.pair > * { max-width: 100%; }
figure { margin: 0; max-width: 34rem; break-inside: avoid; }
figcaption { font-weight: 600; font-size: .95rem; margin-bottom: .3rem; }
svg { display: block; width: 100%; height: auto; }
svg text { font-size: 11px; fill: var(--ink); font-variant-numeric: tabular-nums; }
svg .axis { fill: var(--soft); } svg .value { font-weight: 600; } svg .end { fill: var(--c); }
.grid { stroke: var(--rule); stroke-width: 1; }
.one { stroke: var(--soft); stroke-width: 1.2; stroke-dasharray: 3 3; }
.line { fill: none; stroke: var(--c); stroke-width: 1.8; stroke-linejoin: round; }
.dot { fill: var(--c); stroke: var(--paper); stroke-width: 1; }
.hollow { fill: var(--paper); stroke: var(--c); stroke-width: 1.6; }
.whisker { stroke: var(--c); stroke-width: 2; opacity: .55; }
.bar { fill: var(--c); }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .1rem 1.1rem; margin: 0 0 .4rem;
  padding: 0; font-size: .85rem; }
.mark { display: inline-block; width: 1em; height: 1em; margin-right: .35em;
  vertical-align: -.1em; }
code, pre { font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace; font-size: .88em; }
pre { background: var(--wash); padding: .8rem 1rem; border-radius: 4px; overflow-x: auto;
  margin: 0; }
.terms dt { font-weight: 600; } .terms dd { margin: 0 0 .8rem; max-width: 46rem; }
@media print { main { padding: 0; max-width: none; } body { font-size: 10pt; }
  .scroll, pre { overflow: visible; } pre { white-space: pre-wrap; overflow-wrap: anywhere; }
  h2, h3, caption { break-after: avoid; } tr, .card, .warning, pre { break-inside: avoid; } }
"""


# --- the stage ----------------------------------------------------------------------------------


def gather(args: argparse.Namespace) -> Inputs:
    """Read everything the command line names."""

    def shards(paths: list[str]) -> list[tuple[str, dict[str, Any]]]:
        return [(Path(p).parent.name, read_counts(p)) for p in paths]

    return Inputs(
        target=read(Target, args.identity),
        corpus=[(Path(p).stem, read_counts(p)) for p in args.corpus],
        tokens=shards(args.tokens),
        features=shards(args.features),
        drafters=read_drafters(args.training, args.evaluations, args.exports),
        costs=read_costs(args.benchmarks),
    )


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m dflash.report", description="Write the report, or print a summary."
    )
    parser.add_argument("--show", type=Path, metavar="SUMMARY", help="print this summary's table")
    parser.add_argument("--settings", default="{}", help="JSON; the report has no settings yet")
    add = parser.add_argument
    needed = [
        add("--identity", help="identity.json of the target stage"),
        add("--training", nargs="+", help="training.json of each drafter, in order"),
        add("--evaluations", nargs="+", help="of each drafter on each task, in order"),
        add("--exports", nargs="+", help="config.json in each exported folder"),
        add("--html", type=Path, help="page to write"),
        add("--summary", type=Path, help="summary.json to write"),
    ]
    add("--corpus", nargs="*", default=[], help="statistics of the corpus stage")
    add("--tokens", nargs="*", default=[], help="statistics of the regenerate stage")
    add("--features", nargs="*", default=[], help="manifests of the extract stage")
    add("--benchmarks", type=Path, help="folder of Snakemake's benchmarks, a folder each stage")
    args = parser.parse_args(argv)
    missing = [a.option_strings[0] for a in needed if getattr(args, a.dest) is None]
    if missing and not args.show:
        parser.error(f"missing {', '.join(missing)} (or --show)")
    return args


def main(argv: list[str] | None) -> None:
    args = parse(argv)
    if args.show:
        print(closing_table(read(Summary, args.show), args.show.parent))
        return
    read_settings(args.settings)
    inputs = gather(args)
    report = os.path.relpath(args.html, args.summary.parent)
    write_text(args.html, page(inputs) + "\n")
    write_json(args.summary, summarise(inputs, report))
    print(f"report: {args.html}, summary: {args.summary}")


if __name__ == "__main__":
    entrypoint(main)
