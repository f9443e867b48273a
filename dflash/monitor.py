"""What a training tells while it runs: where its time goes, a log, and what looks wrong in it.

`metrics.jsonl` in the run directory has a line every few steps and one a validation, TensorBoard the
same; the progress bar shows loss, acceptance, tokens a second and peak memory.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from dflash import config
from dflash.errors import UserError, explain_oserror
from dflash.progress import progress

PARTS = ("data", "forward", "backward", "optimizer", "validate", "save")


class Clock:
    """Seconds spent in each part of a training.

    On a GPU the parts are timed by events on its stream, as the CPU only queues work.
    """

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        if self.cuda:
            ends = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            ends[0].record()
            yield
            ends[1].record()
            self.events.append((part, *ends))
        else:
            begun = time.perf_counter()
            yield
            self.seconds[part] += time.perf_counter() - begun

    def read(self) -> dict[str, float]:
        """The seconds so far; waits for the GPU."""
        if self.events:
            torch.cuda.synchronize()
            for part, begun, ended in self.events:
                self.seconds[part] += begun.elapsed_time(ended) / 1e3
            self.events.clear()
        return dict(self.seconds)


def peak_memory_mb(device: torch.device) -> float:
    """Peak memory of this process so far: of its GPU, or resident; MB (10⁶ bytes)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 1e6
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(x for x in lines if x.startswith("VmHWM")).split()[1]) * 1024 / 1e6
    except (OSError, StopIteration):  # not Linux
        return float("nan")


class Board:
    """TensorBoard events of a training.

    torch's SummaryWriter writes in a thread, which loses what a kill finds in its queue, and answers a
    full disk with a traceback of its own.
    """

    def __init__(self, run: Path, first: int):
        """What earlier processes wrote of steps after `first` no longer counts."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        name = f"events.out.tfevents.{time.time_ns() // 10**9}.{socket.gethostname()}.{os.getpid()}"
        self.file = RecordWriter(open(run / name, "ab"))  # noqa: SIM115 (closed by `close`)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        begun = SessionLog(status=SessionLog.START)
        self._write(Event(wall_time=time.time(), step=first + 1, session_log=begun))

    def add(self, step: int, figures: dict[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=k, simple_value=v) for k, v in figures.items()]
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def _write(self, event: Any) -> None:
        self.file.write(event.SerializeToString())
        self.file.flush()

    def close(self) -> None:
        self.file.close()


class Log:
    """The lines of a training, on rank 0; on others nothing is written."""

    def __init__(
        self, run: Path, history: list[dict[str, Any]], first: int, steps: int, shown: bool
    ):
        """`history` are the lines before step `first`, which stay."""
        self.run, self.history, self.shown = run, history, shown
        self.first, self.steps, self.begun = first, steps, time.monotonic()
        self.bar = progress(desc="train", total=steps, initial=first, unit="steps", show=shown)
        self.last: dict[str, Any] = {}
        self.tokens = 0.0
        self.said: set[str] = set()
        self.mark: tuple[float, float] | None = None
        if shown:
            self.board = Board(run, first)
            self.file = open(run / "metrics.jsonl", "a", buffering=1)  # noqa: SIM115 (closed below)

    @property
    def seconds(self) -> float:
        """Since this process began to train."""
        return max(time.monotonic() - self.begun, 1e-9)

    def line(self, row: dict[str, Any]) -> None:
        """Keep one line: averages of some steps, or a validation. Raises UserError when the disk does
        not take it."""
        self.history.append(row)
        if not self.shown:
            return
        try:
            self.file.write(json.dumps(row) + "\n")
            self.board.add(row["step"], {key: v for key, v in _flat(row) if key != "step"})
        except OSError as e:
            raise UserError(f"{self.run}: its log: {explain_oserror(e)}") from None

    def show(self, **figures: Any) -> None:
        """What stands in the bar from now on."""
        self.last |= figures

    def advance(self, tokens: float) -> None:
        """One more step, of so many context tokens."""
        self.tokens += tokens
        self.bar.update()
        figures = self.last | {"tok/s": f"{self.tokens / self.seconds:,.0f}"}
        order = ("loss", "accepted", "tau", "tok/s", "mem")
        self.bar.set_postfix({k: figures[k] for k in order if k in figures}, refresh=False)

    def waited(self, data_seconds: float) -> float:
        """The share of the time since the last call that went by waiting for data, of which there
        were `data_seconds` so far. 0 at the first, as nothing could be read ahead of the first step.
        """
        before, self.mark = self.mark, (self.seconds, data_seconds)
        if before is None:
            return 0.0
        passed, waited = (now - then for now, then in zip(self.mark, before, strict=True))
        return waited / max(passed, 1e-9)

    def warn(self, sentences: list[str]) -> None:
        """Say what looks wrong, each thing once."""
        for sentence in sentences:
            key = sentence.split(":")[0]
            if self.shown and key not in self.said:
                print(f"warning: {sentence}")
            self.said.add(key)

    def close(self) -> None:
        self.bar.close()
        if self.shown:
            with suppress(OSError):  # said already: every line is flushed
                self.board.close()
            with suppress(OSError):
                self.file.close()


def _flat(row: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in row.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}/")
        elif isinstance(value, list):
            yield from _flat(dict(enumerate(value, 1)), f"{prefix}{key}/")
        elif isinstance(value, int | float):
            yield f"{prefix}{key}", value


# --- what looks wrong -----------------------------------------------------------------------------


def of_steps(row: dict[str, Any], waited: float) -> list[str]:
    """What a line of the log says against the training, which waited for data a share of its time."""
    found = []
    if waited > 0.1:
        found.append(
            f"data: {waited:.0%} of the time is waiting for documents; raise machine.train.loader_threads "
            "and loader_mb, or put the features on a faster disk"
        )
    if row["supervised"] < 0.02:
        found.append(
            f"loss mask: only {row['supervised']:.1%} of the drawn slots teach anything; check the chat "
            "template's end tokens, regenerate.max_new_tokens and head_tokens"
        )
    return found


def of_validation(found: dict[str, Any], done: float, settings: config.Drafter) -> list[str]:
    """What a validation says against the drafter after a share `done` of the training."""
    slots, said = found["per_slot"], []
    if done >= 0.5 and slots and slots[0] < 0.02:
        said.append(
            f"nothing is accepted: slot 1 is right in {slots[0]:.1%} of the cycles after {done:.0%} of the "
            "steps; check that mask_token_id is a reserved token, that the features are this target's, and "
            "the learning rate"
        )
    elif done >= 0.5 and len(slots) > 1 and slots[1] < 0.05 * slots[0]:
        said.append(
            f"no improvement over the first slot: slot 2 is accepted in {slots[1]:.1%} of the cycles, slot 1 "
            f"in {slots[0]:.1%}; train longer, raise training.loss.gamma ({config.gamma(settings):g}), or "
            "lower block_size"
        )
    return said


@contextmanager
def profiled(run: Path, wanted: list[int] | None, device: torch.device) -> Iterator[Any]:
    """Yields `begin_step(step)`, to be called at the start of each; records the steps asked for."""
    if wanted is None:
        yield lambda step: None
        return
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] if device.type == "cuda" else []
    recording = None

    def finish() -> None:
        nonlocal recording
        if recording is not None:
            recording.stop()
            path = run / f"profile-{wanted[0]}-{wanted[1]}.json"
            recording.export_chrome_trace(str(path))
            print(f"profile of steps {wanted[0]} to {wanted[1]}: {path}")
            recording = None

    def begin_step(step: int) -> None:
        nonlocal recording
        if recording is None and step == wanted[0]:
            recording = profile(activities=activities)
            recording.start()
        elif step == wanted[1] + 1:
            finish()

    try:
        yield begin_step
    finally:
        finish()
