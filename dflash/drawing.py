"""Numbers as text, HTML that is escaped by construction, and charts as inline SVG.

A series has a name and a look: a small whole number that decides its colour and marker, so that
the same thing looks the same in every chart. Colours and fonts are the page's style's.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

# --- numbers as text ----------------------------------------------------------------------------


def number(x: float | None, digits: int = 2, dash: str = "–") -> str:
    """Fixed digits with thousands separators; a dash for what was not measured."""
    return dash if x is None else f"{x:,.{digits}f}"


def percent(x: float, digits: int = 0) -> str:
    return f"{100 * x:.{digits}f} %"


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
        if count < 999.5:  # what would be rounded to 1e+03
            return f"{count:.3g} {unit}"
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
    """A table; columns from `numeric_from` on are numbers.

    The first cell of a row heads it. Where it is None, the one above heads this row as well.
    """

    def kind(column: int) -> str | None:
        return "n" if column >= numeric_from else None

    body = []
    for at, (first, *cells) in enumerate(rows):
        span = 1 + len(list(takewhile(lambda row: row[0] is None, rows[at + 1 :])))
        span = span if span > 1 else None
        heading = el("th", first, scope="row", rowspan=span) if first is not None else None
        body.append(
            el("tr", heading, [el("td", c, class_=kind(i)) for i, c in enumerate(cells, 1)])
        )
    top = el("tr", [el("th", h, scope="col", class_=kind(i)) for i, h in enumerate(head)])
    whole = el("table", el("caption", caption), el("thead", top), el("tbody", body))
    return el("div", whole, class_="scroll", tabindex="0", role="region", aria_label=caption)


# --- parts of a chart ---------------------------------------------------------------------------

WIDTH, HEIGHT = 380, 230  # of a chart, in its own units; text is 11 of them high
NOTHING = "Nothing to draw: not measured."
LOOKS = 6  # colours; markers have another period, so that 30 series differ
MARKERS = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",  # circle
    "M-3.6-3.6h7.2v7.2h-7.2z",  # square
    "M0-4.8L4.6 3.4H-4.6z",  # triangle
    "M0-5.2L5.2 0L0 5.2L-5.2 0z",  # diamond
    "M-1.5-4.5h3v3h3v3h-3v3h-3v-3h-3v-3h3z",  # cross
)


@dataclass(frozen=True)
class Series:
    """The points of one curve or of one colour of bars."""

    name: str
    look: int
    points: list[tuple[float, float]]


@dataclass(frozen=True)
class Dot:
    """A value in a row of a dot chart, perhaps with an interval and a second, pooled value."""

    name: str
    look: int
    value: float | None
    interval: tuple[float, float] | None = None
    pooled: float | None = None


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


def colour(look: int) -> str:
    """The class that gives a look's colour."""
    return f"s{look % LOOKS}"


def marker(look: int, x: float, y: float, title: str | None = None, hollow: bool = False) -> Html:
    """A look's mark at a place; the title shows when pointed at."""
    shape = el("path", d=MARKERS[look % len(MARKERS)], class_="hollow" if hollow else "dot")
    label = el("title", title) if title else None
    return el("g", label, shape, class_=colour(look), transform=f"translate({x} {y})")


def legend_mark(look: int) -> Html:
    """A look's mark within text."""
    return el("svg", marker(look, 7, 7), viewBox="0 0 14 14", class_="mark", aria_hidden="true")


def ticks(low: float, high: float, about: int = 5, smallest: float = 0.0) -> list[float]:
    """Round numbers, about so many, that enclose a range; never closer than `smallest`."""
    if high <= low:
        low, high = low - 0.5, high + 0.5
    step = max((high - low) / about, smallest)
    power = 10.0 ** math.floor(math.log10(step))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= step * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 10) for i in range(first, last + 1)]


def axes(f: Frame, x_ticks: list[float], x_title: str, y_ticks=(), y_title="", share=False) -> Html:
    """Labels below the frame and, if it has `y_ticks`, at the left; grid lines from the latter."""
    parts = [el("text", y_title, x=2, y=11, class_="axis")] if y_title else []
    for t in y_ticks:
        y, text = f.py(t), f"{100 * t:g} %" if share else f"{t:g}"
        parts.append(el("line", x1=f.left, x2=f.right, y1=y, y2=y, class_="grid"))
        parts.append(el("text", text, x=f.left - 6, y=y + 4, text_anchor="end"))
    for t in x_ticks:
        x, y = f.px(t), f.bottom
        if not y_ticks:
            parts.append(el("line", x1=x, x2=x, y1=f.top, y2=y, class_="grid"))
        parts.append(el("text", f"{t:g}", x=x, y=y + 14, text_anchor="middle"))
    end = el("text", x_title, x=f.right, y=f.bottom + 29, text_anchor="end", class_="axis")
    return join(parts, end)


def figure(
    title: str, drawing=(), shown: Sequence[Series | Dot] = (), note=NOTHING, height=HEIGHT
) -> Html:
    """A drawing with its title, a note, and a legend if it shows several series."""
    legend = [el("li", legend_mark(s.look), s.name) for s in shown]
    size, xmlns = f"0 0 {WIDTH} {height}", "http://www.w3.org/2000/svg"
    svg = el("svg", el("title", title), drawing, viewBox=size, role="img", xmlns=xmlns)
    return el(
        "figure",
        el("figcaption", title),
        el("ul", legend, class_="legend") if len(shown) > 1 else None,
        svg if drawing else None,
        el("p", note, class_="note") if note else None,
    )


# --- charts -------------------------------------------------------------------------------------


def thin(points: list[tuple[float, float]], most: int = 240) -> list[tuple[float, float]]:
    """At most so many points: means of equal groups of neighbours, placed at the group's end."""
    size = math.ceil(len(points) / most) or 1
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [(g[-1][0], sum(y for _, y in g) / len(g)) for g in groups]


def line_chart(
    title: str,
    series: list[Series],
    x_title: str,
    y_title: str,
    note: str | None = None,
    share: bool = False,
) -> Html:
    """Curves. Shares have a mark at every point; others at a few, with the last value beside."""
    series = [s for s in series if s.points]
    if not series:
        return figure(title)
    xs, ys = zip(*(point for s in series for point in s.points), strict=True)
    low, high = (min(xs), max(xs)) if max(xs) > min(xs) else (min(xs) - 1, max(xs) + 1)
    y_ticks = ticks(0 if share else min(ys), max(ys))
    x_ticks = [t for t in ticks(low, high, 7, smallest=1) if low <= t <= high]
    right = WIDTH - (14 if share else 44)  # room for the last value
    frame = Frame((low, high), (y_ticks[0], y_ticks[-1]), right=right)
    drawing = [axes(frame, x_ticks, x_title, y_ticks, y_title, share)]
    for s in series:
        at = [(frame.px(x), frame.py(y)) for x, y in s.points]
        path = " ".join(f"{x},{y}" for x, y in at)
        drawing.append(el("polyline", points=path, class_=f"line {colour(s.look)}"))
        marks = len(at) if share else 6 if len(series) > 1 else 1
        for i in range(len(at) - 1, -1, -max(1, len(at) // marks)):
            x, y = s.points[i]
            value = percent(y, 1) if share else number(y, 3)
            drawing.append(marker(s.look, *at[i], title=f"{s.name}: {value} at {x_title} {x:g}"))
    above = -math.inf  # last values are moved down where they would overlap
    for s in sorted([] if share else series, key=lambda s: -s.points[-1][1]):
        x, value = s.points[-1]
        above = max(frame.py(value), above + 12)
        look = f"value end {colour(s.look)}"
        drawing.append(el("text", number(value), x=frame.px(x) + 8, y=above + 4, class_=look))
    return figure(title, drawing, series, note)


def bar_chart(title: str, series: list[Series], x_title: str, y_title: str, note: str) -> Html:
    """Shares as groups of bars, one group for each whole number on the x axis, from 1 on."""
    series = [s for s in series if s.points]
    if not series:
        return figure(title)
    last = max(x for s in series for x, _ in s.points)
    y_ticks = ticks(0, max(y for s in series for _, y in s.points))
    x_ticks = [t for t in ticks(1, last, 16, smallest=1) if 1 <= t <= last]
    frame = Frame((0.5, last + 0.5), (0, y_ticks[-1]))
    drawing = [axes(frame, x_ticks, x_title, y_ticks, y_title, share=True)]
    room = 0.8 * (frame.px(1.5) - frame.px(0.5)) / len(series)
    width = round(room * 0.92, 1)
    for i, s in enumerate(series):
        for x, y in s.points:
            left, top = round(frame.px(x - 0.4) + i * room, 1), frame.py(y)
            height, middle = round(frame.bottom - top, 1), round(left + width / 2, 1)
            bar = el("rect", x=left, y=top, width=width, height=height, class_="bar")
            hint = el("title", f"{s.name}: {x:g} {x_title} in {percent(y, 1)}")
            drawing.append(el("g", hint, bar, class_=colour(s.look)))
            if len(series) > 1:
                drawing.append(marker(s.look, middle, round(top - 6, 1)))
            elif last <= 10:
                text = percent(y) if y >= 0.005 else "<1 %"
                drawing.append(el("text", text, x=middle, y=top - 4, text_anchor="middle"))
    return figure(title, drawing, series, note)


def dot_chart(title: str, rows: list[tuple[str, list[Dot]]], x_title: str, note: str) -> Html:
    """Rows of values on one scale, with a line at 1. The last row is the one over all others."""
    dots = [d for _, row in rows for d in row]
    values = [v for d in dots for v in (d.value, d.pooled, *(d.interval or ())) if v is not None]
    if not values:
        return figure(title)
    room = 0.04 * (max(1.0, *values) - min(1.0, *values))  # so that no mark sits on the edge
    at = ticks(min(1.0, min(values) - room), max(1.0, max(values) + room))
    left = min(150, 26 + 6 * max(len(label) for label, _ in rows))
    each = 12 + 12 * len(rows[-1][1])
    frame = Frame((at[0], at[-1]), (0, 1), left=left, top=6, bottom=6 + each * len(rows))
    one, top = frame.px(1), frame.top
    drawing = [axes(frame, at, x_title)]
    drawing.append(el("line", x1=one, x2=one, y1=top, y2=frame.bottom, class_="one"))
    for label, row in rows:
        short = label if len(label) <= 22 else label[:21] + "…"
        text, y = [el("title", label), short], top + each / 2 + 4
        strong = "value" if row is rows[-1][1] else None
        drawing.append(el("text", text, x=left - 10, y=y, text_anchor="end", class_=strong))
        for k, dot in enumerate(row, 1):
            drawing += dot_marks(frame, dot, top + 12 * k, label)
        top += each
    return figure(title, drawing, rows[-1][1], note, height=round(frame.bottom + 36))


def dot_marks(frame: Frame, dot: Dot, y: float, label: str) -> list[Html]:
    """A dot with its interval as a line and its pooled value as a hollow mark."""
    parts = []
    if dot.interval:
        x1, x2 = map(frame.px, dot.interval)
        whisker = el("line", x1=x1, x2=x2, y1=y, y2=y, class_="whisker")
        parts.append(el("g", whisker, class_=colour(dot.look)))
    for value, what in ((dot.pooled, " pooled"), (dot.value, "")):
        if value is not None:
            title = f"{dot.name}, {label}: {number(value, 3)}{what}"
            parts.append(marker(dot.look, frame.px(value), y, title, hollow=bool(what)))
    return parts
