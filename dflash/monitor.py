"""What a training tells while it runs: where its time goes, a log, and what looks wrong in it.

`metrics.jsonl` in the run directory has a line every few steps and one a validation, TensorBoard the
same; the progress bar shows loss, acceptance, tokens a second and peak memory.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from dflash import config
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


class Log:
    """The lines of a training, on rank 0; on others nothing is written."""

    def __init__(
        self, run: Path, history: list[dict[str, Any]], first: int, steps: int, shown: bool
    ):
        """`history` are the lines before step `first`, which stay."""
        self.history, self.shown = history, shown
        self.first, self.steps, self.begun = first, steps, time.monotonic()
        self.bar = progress(desc="train", total=steps, initial=first, unit="steps", show=shown)
        self.last: dict[str, Any] = {}
        self.tokens = 0.0
        self.said: set[str] = set()
        if shown:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(run), purge_step=first + 1)
            self.file = open(run / "metrics.jsonl", "a", buffering=1)  # noqa: SIM115 (closed below)

    @property
    def seconds(self) -> float:
        """Since this process began to train."""
        return max(time.monotonic() - self.begun, 1e-9)

    def line(self, row: dict[str, Any]) -> None:
        """Keep one line: averages of some steps, or a validation."""
        self.history.append(row)
        if not self.shown:
            return
        self.file.write(json.dumps(row) + "\n")
        for key, value in _flat(row):
            if key != "step":
                self.board.add_scalar(key, value, row["step"])

    def show(self, **figures: Any) -> None:
        """What stands in the bar from now on."""
        self.last |= figures

    def advance(self, tokens: float) -> None:
        """One more step, of so many context tokens."""
        self.tokens += tokens
        self.bar.update()
        self.bar.set_postfix(
            **self.last, **{"tok/s": f"{self.tokens / self.seconds:,.0f}"}, refresh=False
        )

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
            self.board.close()
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


def of_steps(row: dict[str, Any], total_seconds: float) -> list[str]:
    """What a line of the log says against the training."""
    found = []
    waits = row["seconds"]["data"] / max(total_seconds, 1e-9)
    if waits > 0.1:
        found.append(
            f"data: {waits:.0%} of the time is waiting for documents; raise machine.train.loader_threads "
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
