"""What the report reads of the other stages' results, and the summary made from that."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from dflash.config import STAGE_VERSION
from dflash.errors import UserError
from dflash.files import read_json

# --- the part of each file that is used ---------------------------------------------------------


class Read(BaseModel):
    """Base of what is read: other fields are ignored, numbers are finite."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class Lossless(Read):
    checked: int  # outputs compared with the target's own
    identical: int  # of these the same
    divergences: int | None = None  # tokens that are not the target's choice
    near_ties: int = 0  # of these with its two best logits at most so far apart:
    near_tie_margin: float = 0.0
    largest_margin: float | None = None


class Acceptance(Read):
    """What both offline decoding and a server tell."""

    responses: int
    cycles: int
    tau_mean: float | None
    tau_mean_interval: tuple[float, float] | None = None
    tau_pooled: float | None
    tau_pooled_interval: tuple[float, float] | None = None
    per_slot: list[float]


class Figures(Acceptance):
    """Acceptance and speed on some prompts, as `evaluate` writes them and the summary repeats."""

    speed_up: float | None
    speed_up_lookup: float | None = None
    tau_timed: float | None = None
    tau_lookup: float | None = None
    seconds_per_token_plain: float | None = None
    seconds_per_token_drafted: float | None = None
    lossless: Lossless
    draft_share: float | None = None


class Timed(Read):  # one prompt decoded alone
    drafted_tokens: int
    drafted_cycles: int


class Said(Read):  # one answer, offline or served
    sample_id: str
    turn: int = 1
    tokens_sha256: str


class Response(Said):  # one prompt decoded in a batch
    cycles: list[int]  # tokens that each one gave
    identical: bool | None = None


class Evaluation(Read):
    """One drafter on one task, at one temperature and block size."""

    drafter: str
    task: str
    block_size: int
    temperature: float = 0.0
    rule: str | None = None  # of accepting samples
    dtype: str
    max_new_tokens: int
    measured_on: str = ""  # device, threads and versions: what the speed belongs to
    overall: Figures
    per_kind: dict[str, Figures]
    per_language: dict[str, Figures] = {}
    timed: list[Timed]
    responses: list[Response]

    @property
    def what(self) -> str:
        """Names it among all evaluations."""
        run = f" with blocks of {self.block_size} at temperature {self.temperature:g}"
        return f"{self.drafter} on {self.task}{run}"


class ServedFigures(Acceptance):
    tokens_per_second: float | None


class Served(Read):
    """One drafter on one task, as a running server told of it."""

    drafter: str
    task: str
    engine: str
    temperature: float
    overall: ServedFigures
    responses: list[Said]


class LogLine(Read):  # averages over some training steps
    step: int
    epoch: float = 0.0
    loss: float
    accepted_by_position: float
    labels_outside_head: int = 0
    seconds_per_step: float | None = None


class Validated(Read):  # the drafter during training, on documents kept from it
    step: int
    block_size: int
    tau_mean: float
    tau_pooled: float
    by_position: float


class Best(Read):
    step: int
    tau_mean: float


class Training(Read):
    """A drafter's training.json."""

    name: str
    steps: int
    documents: int
    documents_without_block: int = 0
    documents_repeated: int = 0
    head_tokens: int | None = None
    weights: int | None = None
    settings: dict[str, Any] = {}
    documents_validated: int = 0
    skipped_steps: int = 0
    best: Best | None = None
    shares: dict[str, float] = {}
    history: list[LogLine]
    validations: list[Validated] = []

    @property
    def last(self) -> LogLine | None:
        return self.history[-1] if self.history else None


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
    dflash_config: dict[str, Any]


class Statistics(Read, extra="allow"):
    """What a stage counted."""

    ended_share: float | None = None
    kinds: dict[str, dict[str, int]] = {}  # by split

    @property
    def counts(self) -> dict[str, int]:
        """Every whole number, whatever its name."""
        return {k: v for k, v in (self.model_extra or {}).items() if type(v) is int}


class Target(Read, extra="allow"):
    """The target's identity.json, which is shown whole but for its files."""

    model: str
    folder: str
    files: dict[str, int]


@dataclass(frozen=True)
class Drafter:
    """All that is known of one drafter."""

    name: str
    look: int  # its place among the drafters: decides colour and marker
    training: Training
    config: ExportConfig
    export: Path
    export_bytes: int | None
    runs: dict[str, list[Evaluation]]  # by task, one for each temperature and block size
    served: dict[str, list[Served]]

    @property
    def tasks(self) -> dict[str, Evaluation]:
        """The evaluation that leads each task: the first one given."""
        return {task: runs[0] for task, runs in self.runs.items()}

    @property
    def task(self) -> Evaluation:
        """The evaluation that the headline speaks of: that of the first task."""
        return next(iter(self.tasks.values()))


@dataclass(frozen=True)
class Cost:
    """What all jobs of a stage took together."""

    jobs: int
    seconds: float
    peak_mb: float | None  # of the largest job; None where no job was long enough to be sampled


Counts = list[tuple[str, Statistics]]  # with the source that each file is about


@dataclass(frozen=True)
class Inputs:
    """Everything the report is made from."""

    target: Target
    corpus: Counts
    tokens: Counts
    features: Counts
    drafters: list[Drafter]
    costs: dict[str, Cost]


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


def _read_each(model: type[R], paths: list[str], name: Callable[[str, R], str]) -> dict[str, R]:
    found: dict[str, R] = {}
    for path in paths:
        value = read(model, path)
        key = name(path, value)
        if key in found:
            raise UserError(f"{path}: {key} was given twice; pass each file once")
        found[key] = value
    return found


def read_drafters(
    trainings: list[str], evaluations: list[str], exports: list[str], served: list[str]
) -> list[Drafter]:
    """The drafters in the order of their training files.

    Raises UserError when one lacks its export or a task's evaluation, or has one of them twice.
    """
    trained = _read_each(Training, trainings, lambda _, t: t.name)
    configs = _read_each(ExportConfig, exports, lambda path, _: Path(path).parent.name)
    measured = _read_each(Evaluation, evaluations, lambda _, e: e.what).values()
    asked = _read_each(Served, served, lambda path, _: path).values()
    folders = {Path(path).parent.name: Path(path).parent for path in exports}
    tasks = list(dict.fromkeys(e.task for e in measured))
    drafters = []
    for look, (name, training) in enumerate(trained.items()):
        runs = {t: [e for e in measured if (e.drafter, e.task) == (name, t)] for t in tasks}
        for task in tasks:
            if not runs[task]:
                what = f"drafter {name} has no evaluation on task {task}"
                raise UserError(f"{what}; run the evaluate stage for it and pass its file")
        if name not in configs:
            raise UserError(f"drafter {name} has no export; run the export stage for it")
        weights = folders[name] / "model.safetensors"
        size = weights.stat().st_size if weights.exists() else None
        told = {t: [s for s in asked if (s.drafter, s.task) == (name, t)] for t in tasks}
        drafters.append(
            Drafter(name, look, training, configs[name], folders[name], size, runs, told)
        )
    return drafters


def read_costs(benchmarks: list[Path]) -> dict[str, Cost]:
    """Time and memory of each stage, from the Snakemake benchmarks of exactly the current jobs.

    A benchmark's folder is named by its stage; one that does not exist (a job whose output was
    there before) counts for nothing.
    """
    costs = {}
    for stage in STAGE_VERSION:
        files = sorted(p for p in benchmarks if p.parent.name == stage and p.exists())
        if stage == "report":  # an earlier one's
            continue
        rows = [row for path in files for row in _benchmark(path)]
        if rows:
            peaks = [peak for _, peak in rows if peak is not None]
            costs[stage] = Cost(len(rows), sum(s for s, _ in rows), max(peaks, default=None))
    return costs


def _benchmark(path: Path) -> list[tuple[float, float | None]]:
    """(seconds, peak memory in MB) of each row; a job too short to be sampled has no memory."""
    with open(path, newline="", encoding="utf-8") as f:
        rows = [(r.get("s"), r.get("max_rss")) for r in csv.DictReader(f, delimiter="\t")]
    try:
        found = [(float(s), None if p in (None, "", "NA", "-") else float(p)) for s, p in rows]
    except (TypeError, ValueError):
        found = []
    if not found or not all(math.isfinite(s) for s, _ in found):
        raise UserError(f"{path}: not a Snakemake benchmark (no seconds in column `s`); {AGAIN}")
    return found


# --- what follows from it -----------------------------------------------------------------------


def total(files: Counts, key: str) -> int:
    """Sum of one count over all files that state it."""
    return sum(s.counts.get(key, 0) for _, s in files)


def break_even(e: Evaluation) -> tuple[float, float] | None:
    """Tokens a cycle must give to decode as fast as without drafting, and those it gave.

    Of the timed prompts.
    """
    cycles = sum(t.drafted_cycles for t in e.timed)
    if not cycles or not e.overall.speed_up:
        return None
    tau = sum(t.drafted_tokens - 1 for t in e.timed) / cycles  # the first token is the prefill's
    return tau / e.overall.speed_up, tau


def same_answers(e: Evaluation, served: Served) -> tuple[int, int]:
    """Answers that a server gave token by token as offline decoding did, and all that both gave."""
    ours = {(r.sample_id, r.turn): r.tokens_sha256 for r in e.responses}
    both = [r for r in served.responses if (r.sample_id, r.turn) in ours]
    return sum(ours[r.sample_id, r.turn] == r.tokens_sha256 for r in both), len(both)


def summarise(inputs: Inputs, report: str) -> dict[str, Any]:
    """What `summary.json` holds; `report` is the page's path as seen from there."""
    return {
        "target": inputs.target.model,
        "drafters": {d.name: _drafter_summary(d) for d in inputs.drafters},
        "stages": {stage: round(c.seconds, 4) for stage, c in inputs.costs.items()},
        "peak_memory_mb": {stage: c.peak_mb for stage, c in inputs.costs.items()},
        "sizes": {
            "target_bytes": sum(inputs.target.files.values()),
            "prompts": total(inputs.corpus, "kept"),
            **{
                key: total(inputs.tokens, key) for key in ("documents", "tokens", "response_tokens")
            },
            **{f"feature_{k}": total(inputs.features, k) for k in ("documents", "tokens", "bytes")},
            "drafter_weights": {d.name: d.training.weights for d in inputs.drafters},
            "export_bytes": {d.name: d.export_bytes for d in inputs.drafters},
        },
        "report": report,
    }


def _drafter_summary(d: Drafter) -> dict[str, Any]:
    point, last = break_even(d.task), d.training.last
    every = [e for runs in d.runs.values() for e in runs]
    keys = {"task", "temperature", "block_size"}
    runs = [
        e.model_dump(mode="json", include=keys) | e.overall.model_dump(mode="json") for e in every
    ]
    keys = {"task", "temperature", "engine"}
    served = [
        s.model_dump(mode="json", include=keys) | s.overall.model_dump(mode="json")
        for told in d.served.values()
        for s in told
    ]
    tasks = {t: e.overall.model_dump(mode="json") for t, e in d.tasks.items()}
    return {
        **tasks[d.task.task],
        **d.task.model_dump(mode="json", include={"task", "per_kind", "block_size"}),
        "break_even_tau": point[0] if point else None,
        "steps": d.training.steps,
        "final_loss": last.loss if last else None,
        "export": str(d.export),
        **({"tasks": tasks} if len(tasks) > 1 else {}),
        **({"runs": runs} if len(runs) > len(tasks) else {}),
        **({"served": served} if served else {}),
    }


class SummaryDrafter(Figures):
    """A drafter in the summary."""

    task: str
    per_kind: dict[str, Figures]
    tasks: dict[str, Figures] = {}


class Summary(Read):
    """What the closing table needs of `summary.json`."""

    target: str
    drafters: dict[str, SummaryDrafter]
    report: str
