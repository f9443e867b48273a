"""A progress bar with rate and remaining time that also reads well in a log file.

On a terminal it is tqdm's bar. Where the output is piped (Snakemake, SLURM), it is a full line every
few seconds instead, so that several jobs can share one log.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from tqdm import tqdm

LINE_SECONDS = 10.0


class _Lines:
    """Turns tqdm's redrawing into whole lines."""

    def __init__(self, stream):
        self.stream = stream

    def write(self, text: str) -> None:
        text = text.strip("\r\n ")
        if text:
            self.stream.write(text + "\n")

    def flush(self) -> None:
        self.stream.flush()


def progress(
    iterable: Iterable | None = None,
    *,
    desc: str,
    total: float | None = None,
    unit: str = "it",
    initial: float = 0,
    show: bool = True,
) -> tqdm:
    """A bar for `for x in progress(...)` or, without an iterable, for `bar.update(n)`.

    `unit` names what is counted (tokens, documents, steps); rate and remaining time are per unit.
    Without `show` nothing is printed (other ranks than the first).
    """
    tty = sys.stderr.isatty()
    return tqdm(
        iterable,
        desc=desc,
        total=total,
        unit=f" {unit}",
        unit_scale=unit == "tokens",
        initial=initial,
        file=sys.stderr if tty else _Lines(sys.stderr),
        mininterval=0.2 if tty else LINE_SECONDS,
        miniters=1,
        ascii=not tty,
        ncols=None,  # in a log, a line is as long as what it says
        dynamic_ncols=tty,
        disable=not show,
        position=None if tty else 0,  # one inside another moves no cursor in a log
    )
