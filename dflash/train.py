"""Train one drafter on the target's stored hidden states.

    python -m dflash.train --settings S --machine M --identity results/target/identity.json \\
        --features results/features/*/*.json --name demo --runs results/runs/demo --out results/drafters/demo

Under torchrun the processes share out every step's documents:

    torchrun --standalone --nproc-per-node 2 -m dflash.train ...

Checkpoints go to a run directory named by a fingerprint of everything that decides the result
(settings, features, target, code), so that a killed job goes on from its last checkpoint, on any
number of processes, and a changed setting never meets another run's state (`dflash.checkpoint`).
The outputs (float32 weights, config.json, training.json) appear at the end, whole: the weights that
accepted most on the validation documents. In float32 on a CPU a resumed run gives bit for bit the
uninterrupted one.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash import (
    checkpoint,
    config,
    data,
    gradient_check,
    kernels,
    loader,
    monitor,
    ranks,
    recipe,
    target,
    validate,
)
from dflash.corpus import read_table
from dflash.drafter import (
    DTYPES,
    Drafter,
    config_text,
    read_drafter_config,
    save_drafter,
)
from dflash.errors import UserError, entrypoint
from dflash.features import Document, open_shard, store_identity
from dflash.files import read_settings, save_tensors, whole, write_json
from dflash.gradient import Head, accumulate, gradient_norm, make_pack, weights_of_slots
from dflash.initial import new_drafter, start_folder
from dflash.progress import progress
from dflash.ranks import STATUS_INTERRUPTED, Ranks
from dflash.regenerate import SCHEMA

LOG_EVERY = 10  # steps
SNAPSHOTS = 3  # steps that are no number, of which the weights are kept; of others the samples' ids


# --- what a training needs ----------------------------------------------------------------------


def open_features(
    manifests: list[str],
    identity: target.Identity,
    ids: list[int],
    last_hidden: bool = False,
    say: Callable[[str], None] = print,
):
    """Open the shards behind some manifests, refuse those of another target, find our taps.

    With `last_hidden`, shards without the target's last hidden state are refused too. `say` is told
    when they were made in different ways.
    """
    expect = store_identity(identity)
    shards, positions = [], []
    for manifest in manifests:
        shard = open_shard(Path(manifest).with_suffix(".zarr"), expect, Path(manifest))
        positions.append(shard.tap_positions(ids))
        if last_hidden:
            shard.require_last_hidden()
        shard.close()  # checked; there may be thousands
        shards.append(shard)
    if any(p != positions[0] for p in positions):
        raise UserError("the feature shards hold different taps; run extract again")
    made = {f"{s.attributes['compute_dtype']}, {s.attributes['codec']}" for s in shards}
    if len(made) > 1:
        say(f"features: the shards were made in different ways ({'; '.join(sorted(made))})")
    return shards, positions[0]


def total_steps(documents: int, training: config.Training) -> int:
    """Optimiser steps of a training, at least one."""
    steps = max(1, round(training.epochs * documents / training.documents_per_step))
    return min(steps, training.max_steps or steps)


def kinds_of(tokens: list[str]) -> dict[str, str]:
    """Sample id -> kind of its prompt, from token files (`results/tokens/*/*.parquet`).

    Raises UserError for one that is missing, damaged or none.
    """
    kinds: dict[str, str] = {}
    for path in tokens:
        table = read_table(path, SCHEMA, "regenerate", columns=["sample_id", "kind"])
        kinds |= dict(zip(*(column.to_pylist() for column in table.columns), strict=True))
    return kinds


def steps_of_validation(steps: int, training: config.Training) -> set[int]:
    """After how many steps the drafter is measured: `times` at equal distances, the last one too."""
    times = training.validation.times if training.validation.share else 0
    return {max(1, round(steps * i / times)) for i in range(1, times + 1)}


class Interrupted(Exception):
    """A signal or a time limit: saved, to be run again."""


# --- the loop -----------------------------------------------------------------------------------


class Trainer:
    """The training of one drafter: `run` takes it from the last checkpoint in `folder`, if any, to
    the end.

    Every rank makes one alike. `trust_remote_code` is for the target's final norm, where its own
    distribution is asked for; `start` the folder of the drafter to start from, if any; `kinds` tells
    kinds of prompts by sample id, for the validation's figures. Raises UserError where settings and
    features do not fit.
    """

    def __init__(
        self,
        settings: config.Drafter,
        machine: config.TrainMachine,
        identity: target.Identity,
        shards: list,
        positions: list[int],
        folder: Path,
        of: Ranks,
        trust_remote_code: bool = False,
        start: Path | None = None,
        kinds: dict[str, str] | None = None,
    ):
        self.began = time.monotonic()
        self.settings, self.machine, self.training = settings, machine, settings.training
        self.shards, self.positions, self.kinds = shards, positions, kinds or {}
        self.folder, self.of, self.dtype = folder, of, DTYPES[self.training.dtype]
        self._open_documents(identity)
        self.sizes = config.block_sizes(settings)
        self.slot_weights = {size: weights_of_slots(settings, size) for size in self.sizes}
        self.steps = total_steps(len(self.stream), self.training)
        self.head = self._open_head(identity, trust_remote_code)
        self.drafter = new_drafter(settings, identity, trust_remote_code, start)
        self.drafter.to(of.device).train()
        if machine.sharding == "fsdp":
            self.of = ranks.shard(self.drafter, of)
        self.optimizers = recipe.make_optimizers(self.drafter, self.training)
        ema = self.training.ema
        self.average = recipe.Average(self.drafter, ema) if ema is not None else None
        self.state, self.history = checkpoint.State(), []
        self._resume()
        self._introduce()
        if machine.pad_context is not None and machine.pad_blocks is not None:
            largest = self.stream.largest_pack(
                self.state.step,
                self.steps,
                self.training.documents_per_step,
                machine.micro_batch,
                of.world,
            )
            data.check_room(*largest, machine.pad_context, machine.pad_blocks)
        self.clock = monitor.Clock(of.device)

    def _open_documents(self, identity: target.Identity) -> None:
        """The stream of training documents, and the ids of those kept for validation."""
        training, shards, block = self.training, self.shards, self.settings.block_size
        everywhere = training.loss.positions == "all"
        self.frequent = None
        if training.loss.head_tokens:
            self.frequent = loader.frequent_tokens(
                shards, training.loss.head_tokens, identity.vocab_size, everywhere
            )
        validation = training.validation
        self.held = validate.choose(shards, validation.share, validation.documents)
        self.stream = loader.Stream(
            shards,
            self.positions,
            training.seed,
            training.anchors_per_document,
            block,
            config.needs_last_hidden(self.settings),
            everywhere,
            self.frequent,
            without=self.held,
        )
        if self.stream.longest < block:
            raise UserError(
                f"the longest text to learn from has {self.stream.longest} tokens, less than a block of "
                f"{block}: its last slots would never be trained; lower block_size or raise "
                "regenerate.max_new_tokens"
            )

    def _open_head(self, identity: target.Identity, trust_remote_code: bool) -> Head:
        embed, head = target.load_embedding_and_head(identity)
        norm = None
        if config.needs_last_hidden(self.settings):
            norm = target.load_final_norm(identity, trust_remote_code)
        cap = target.load_softcap(identity, trust_remote_code)
        device = self.of.device
        on_device = embed.to(device)
        head = on_device if head is embed else head.to(device)  # a tied table lies there once
        found = Head(on_device, head, self.dtype, norm, cap)
        if self.frequent is not None:
            found.reduce(self.frequent)
        return found

    def _resume(self) -> None:
        """Go on from the newest checkpoint that rank 0 sees."""
        newest = self.of.told([p.name for p in checkpoint.checkpoints(self.folder)][-1:])
        if newest:
            self.state = checkpoint.load(
                self.folder / newest[0], self.drafter, self.optimizers, self.average
            )
        if self.of.first:
            self.history = checkpoint.cut_metrics(
                self.folder, self.state.step, self.state.validated
            )

    def _introduce(self) -> None:
        """Say what is trained, on what and how."""
        of, stream, training, c = self.of, self.stream, self.training, self.drafter.config
        of.say(
            f"drafter: {config_text(c)}; {self.weights:,} weights on {of.device}, {training.dtype}"
            + (f"; {of.world} processes" if of.world > 1 else "")
            + (", weights sharded" if of.sharded else "")
        )
        of.say(
            f"data: {len(stream)} documents ({stream.unusable} without a block left out, "
            f"{stream.repeated} repeated, {len(self.held)} kept for validation), {self.steps} steps of "
            f"{training.documents_per_step} documents x up to {training.anchors_per_document} blocks; "
            f"head over {self.head.head_VH.shape[0]:,} tokens"
            + (f"; going on from step {self.state.step}" if self.state.step else "")
        )
        found = kernels.of_backend(
            self.machine.attention,
            of.device,
            self.dtype,
            c.num_attention_heads,
            c.num_key_value_heads,
            c.head_dim,
        )
        used = ", ".join(f"{k.kernel} ({k.call})" for k in found)
        of.say(
            f"attention: {self.machine.attention}, kernel {used}; checkpointing: "
            f"{self.machine.checkpointing}"
        )
        if note := kernels.warning(found, self.machine.attention):
            of.say(note)
        if of.device.type == "cuda" and self.machine.attention != "flex":
            checked = gradient_check.require(of.device, c, self.training, self.machine)
            of.say(f"kernels: {checked}")
        window = self.machine.profile_steps
        if window and not self.state.step <= window[0] < self.steps:
            of.say(
                f"warning: machine.train.profile_steps: nothing is recorded, as step {window[0]} is not "
                f"among those to come, {self.state.step} to {self.steps - 1}"
            )
        if self.state.step == self.steps:
            of.say(f"this training is finished already; delete {self.folder} to train it anew")

    @property
    def weights(self) -> int:
        return sum(p.numel() for p in self.drafter.parameters())

    def run(self) -> tuple[Drafter, dict[str, Any]]:
        """Train to the end. Returns the drafter to hand over and what is known about its training.

        Raises UserError, and `Interrupted` once a checkpoint is saved after SIGTERM or `stop_minutes`.
        """
        of, state, machine = self.of, self.state, self.machine
        self.log = monitor.Log(self.folder, self.history, state.step, self.steps, of.first)
        plans = (self._plan(step) for step in range(state.step, self.steps))
        pinned = of.device.type == "cuda"
        loaded = loader.load(self.stream, plans, machine, self._pack, pinned)
        due = steps_of_validation(self.steps, self.training) if self.held else set()
        window = machine.profile_steps if of.first else None
        limit = machine.stop_minutes or math.inf
        saved = time.monotonic()
        try:
            with (
                terminations() as terminated,
                monitor.profiled(self.folder, window, of.device) as begin_step,
            ):
                # A stop has no time for a validation, which its successor makes up for.
                if state.step in due and state.validated < state.step and self._validate():
                    self._save()
                for plan, packs in loaded:
                    begin_step(plan.step)
                    leave, late = self._step(
                        plan,
                        packs,
                        lambda saved=saved: (
                            bool(terminated) or _minutes(self.began) > limit,
                            of.first and _minutes(saved) > machine.save_minutes,
                        ),
                    )
                    if state.sums and (state.step % LOG_EVERY == 0 or state.step == self.steps):
                        self._tell()
                    leave = leave and state.step < self.steps
                    better = state.step in due and not leave and self._validate()
                    if better or late or leave or state.step == self.steps:
                        self._save()
                        saved = time.monotonic()
                    if leave:
                        raise Interrupted
        finally:
            loaded.close()
            self.log.close()
        if state.skipped == self.steps:
            raise UserError(
                f"the loss or its gradient was no number in all {self.steps} steps: nothing is learned; see "
                f"{self.folder}/nonfinite-*/report.json"
            )
        return self._handed_over(), self._facts()

    def _plan(self, step: int) -> loader.Plan:
        size = self.sizes[step % len(self.sizes)]
        per_step, of = self.training.documents_per_step, self.of
        return self.stream.plan(step, per_step, self.slot_weights[size], of.rank, of.world)

    def _pack(self, documents: list[data.Document], places: list[loader.Place]) -> data.Pack:
        weights = self.slot_weights[len(places[0].slots_B)]
        anchors_of = [p.anchors_N for p in places]
        of = self.drafter, self.machine, self.dtype, self.head
        return make_pack(documents, anchors_of, weights, *of)

    def _even(self, packs: Iterable[data.Pack]) -> Iterator[data.Pack]:
        """The packs, and idle ones up to the same number on all ranks where weights are sharded."""
        count = 0
        for packed in packs:
            yield packed
            count += 1
        if not self.of.sharded:
            return
        most = math.ceil(self.training.documents_per_step / self.of.world)
        for _ in range(math.ceil(most / self.machine.micro_batch) - count):
            place = loader.Place("", 0, 0, 2, np.zeros(1, np.int64), np.zeros(self.sizes[0]))
            idle = self._pack([self._idle_document()], [place])
            yield replace(idle, sample_ids=[], real_rows=0, real_blocks=0)

    def _idle_document(self) -> Document:
        """Two tokens that teach nothing."""
        states = np.zeros((2, len(self.positions), self.drafter.config.hidden_size), np.uint16)
        last = states[:, 0] if self.stream.last_hidden else None
        return Document("", np.zeros(2, np.int32), np.zeros(2, bool), states, last)

    def _step(
        self,
        plan: loader.Plan,
        packs: loader.Timed[data.Pack],
        wishes: Callable[[], tuple[bool, ...]],
    ) -> tuple[bool, ...]:
        """One optimiser step. Returns which of its wishes (to leave, to save) any rank has."""
        of, training, step = self.of, self.training, plan.step
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        mine = accumulate(
            self.drafter,
            self._even(packs),
            plan.mass,
            self.head,
            training,
            self.machine,
            self.clock,
        )
        self.clock.seconds["data"] += packs.seconds
        counts = {key: value for key, value in asdict(mine).items() if key != "sample_ids"}
        sums = of.sum([*counts.values(), *map(float, wishes())])
        row = dict(zip(counts, sums, strict=False)) | {"mass": plan.mass, "count": 1}
        with self.clock("optimizer"):
            of.sum_gradients(self.drafter)
            row["gradient_norm"] = gradient_norm(self.drafter, training.clip) if plan.mass else 0.0
            if not math.isfinite(row["loss"]) or not math.isfinite(row["gradient_norm"]):
                ids = of.gather(mine.sample_ids) or of.gather([p.sample_id for p in plan.places])
                self._not_finite(step, row, ids)
                self.state.skipped += 1
            else:
                if plan.mass:
                    recipe.set_rates(self.optimizers, recipe.rate(step, self.steps, training))
                    for optimizer in self.optimizers:
                        optimizer.step()
                    if self.average is not None:
                        self.average.update(step)
                self.state.add(row)
        self.state.step = step + 1
        self.log.advance(row["tokens"])
        return tuple(number > 0 for number in sums[len(counts) :])

    def _not_finite(self, step: int, row: dict[str, float], sample_ids: list[str]) -> None:
        """Write down a step that gave no number, with the weights before it; raises UserError unless
        such steps are to be left out."""
        named = dict(self.drafter.named_parameters())
        weights = {name: ranks.full(p.detach()).cpu() for name, p in named.items()}
        finite = {
            name: bool(ranks.full(p.grad).isfinite().all())
            for name, p in named.items()
            if p.grad is not None
        }
        folder = self.folder / f"nonfinite-{step:08d}"
        figures = f"loss {row['loss']}, gradient norm {row['gradient_norm']}"
        if self.of.first:
            others = [
                p for p in self.folder.glob("nonfinite-*/*.safetensors") if p.parent != folder
            ]
            with whole(folder, folder=True) as partial:
                if len(others) < SNAPSHOTS:
                    save_tensors(partial / "drafter.safetensors", weights)
                broken = [name for name, fine in finite.items() if not fine]
                said = {"step": step, "found": figures, "sample_ids": sample_ids}
                write_json(partial / "report.json", said | {"gradients_not_finite": broken})
        self.of.meet()  # an error ends all: not before this is written
        ids = ", ".join(sample_ids[:8]) + (", ..." if len(sample_ids) > 8 else "")
        sentence = (
            f"the loss or its gradient is not finite ({figures}; samples {ids}); see {folder}"
        )
        if self.training.nonfinite == "stop":
            raise UserError(
                f"step {step}: {sentence}; lower training.lr, check these samples' features, or set "
                "training.nonfinite to skip"
            )
        self.of.say(f"step {step} is left out: {sentence}")

    def _tell(self) -> None:
        """Log the averages over the steps since the last line."""
        line = log_line(
            self.state, self.steps, self.training, self.stream, self.clock, self.log, self.of.device
        )
        self.state.sums = {}
        self.log.line(line)
        self.log.warn(monitor.of_steps(line, self.log.waited(line["seconds"]["data"])))
        self.log.show(
            loss=f"{line['loss']:.3f}",
            accepted=line["accepted_by_position"],
            mem=f"{line['peak_memory_mb']:,.0f}MB",
        )

    def _validate(self) -> bool:
        """Measure acceptance, for each size of blocks; whether it is the best so far."""
        state, of, taus = self.state, self.of, []
        with self.clock("validate"):
            measured = self.drafter
            if self.average is not None or of.sharded:
                measured = self._whole(of.device)
            mine = self.held[of.rank :: of.world]
            documents = validate.read(self.shards, self.positions, mine)
            for size in self.sizes:
                desc, show = f"validate, blocks of {size}", of.first
                responses = validate.measure(
                    measured,
                    progress(documents, desc=desc, unit="documents", show=show),
                    self.head.embed_VH,
                    self.head.whole_VH,
                    size,
                    self.kinds,
                    self.dtype,
                )
                found = validate.summary(of.gather(responses), size)
                self.log.line({"step": state.step, "block_size": size, **found})
                done = state.step / self.steps
                self.log.warn(monitor.of_validation(found, done, self.settings))
                taus.append(found["tau_mean"])
        tau = sum(taus) / len(taus)
        state.validated = state.step
        self.log.show(tau=f"{tau:.3f}")
        # Of equal ones the latest: where nothing is accepted yet, it has learned most.
        better = state.best is None or tau >= state.best["tau_mean"]
        if better:
            state.best = {"step": state.step, "tau_mean": tau}
        return better

    def _save(self) -> None:
        with self.clock("save"):
            checkpoint.save(
                self.folder,
                self.state,
                self.drafter,
                self.optimizers,
                self.average,
                self.machine.keep_last,
                self.of,
            )

    def _whole(self, device: torch.device) -> Drafter:
        """A copy with all weights, or their moving averages, on every rank."""
        average = self.average
        own = average.tensors if average is not None else dict(self.drafter.named_parameters())
        with torch.device("meta"):  # no random numbers for weights that are known
            copy = Drafter(self.drafter.config)
        copy = copy.to_empty(device=device).requires_grad_(False).eval()
        for name, p in copy.named_parameters():
            p.copy_(ranks.full(own[name].detach()))
        return copy

    def _handed_over(self) -> Drafter:
        """The weights that accepted most on validation; without one, the last."""
        final, best = self._whole(torch.device("cpu")), self.state.best
        if best is not None and best["step"] != self.steps:
            checkpoint.load_best(self.folder, best["step"], final, self.average is not None)
        return final

    def _facts(self) -> dict[str, Any]:
        if self.state.skipped:
            self.of.say(
                f"{self.state.skipped} of {self.steps} steps were left out, as their loss or gradient was "
                "no number"
            )
        spent = self.clock.read()
        return {
            "steps": self.steps,
            "documents": len(self.stream),
            "documents_without_block": self.stream.unusable,
            "documents_repeated": self.stream.repeated,
            "documents_validated": len(self.held),
            "head_tokens": self.head.head_VH.shape[0],
            "weights": self.weights,
            "skipped_steps": self.state.skipped,
            "best": self.state.best,
            # of the time since this process took its first step
            "shares": {k: round(v / self.log.seconds, 4) for k, v in spent.items()},
            "history": [row for row in self.log.history if "loss" in row],
            "validations": [row for row in self.log.history if "tau_mean" in row],
        }


def _minutes(since: float) -> float:
    return (time.monotonic() - since) / 60


@contextmanager
def terminations() -> Iterator[list[int]]:
    """A list that SIGTERM adds to while the block runs; other threads than the first see none."""
    arrived: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield arrived
        return
    previous = signal.signal(signal.SIGTERM, lambda number, _: arrived.append(number))
    try:
        yield arrived
    finally:
        signal.signal(signal.SIGTERM, previous)


def log_line(
    state: checkpoint.State,
    steps: int,
    training: config.Training,
    stream: loader.Stream,
    clock: monitor.Clock,
    log: monitor.Log,
    device: torch.device,
) -> dict[str, Any]:
    """One line of metrics.jsonl: averages over the steps since the last line.

    `seconds` are those of this process so far, part by part, as `seconds_per_step` is.
    """
    sums = state.sums
    per_step = training.documents_per_step
    share = recipe.rate(state.step - 1, steps, training)
    return {
        "step": state.step,
        "epoch": round(state.step * per_step / len(stream), 3),
        "loss": round(sums["loss"] / max(sums["mass"], 1e-12), 5),
        "accepted_by_position": round(sums["accepted"] / max(sums["blocks"], 1), 4),
        "first_slot": round(sums["first"] / max(sums["blocks"], 1), 4),
        "gradient_norm": round(sums["gradient_norm"] / sums["count"], 5),
        "lr": training.lr * share,
        "tokens": sums["tokens"],
        "supervised": round(sums["supervised"] / max(sums["slots"], 1), 4),
        "labels_outside_head": sums["outside_head"],
        "skipped_steps": state.skipped,
        "seconds_per_step": round(log.seconds / (state.step - log.first), 4),
        "tokens_per_second": round(log.tokens / log.seconds, 1),
        "peak_memory_mb": round(monitor.peak_memory_mb(device), 1),
        "seconds": {part: round(spent, 3) for part, spent in clock.read().items()},
    }


def main(argv: list[str] | None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m dflash.train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,  # commands keep their lines
    )
    parser.add_argument("--settings", required=True, help="JSON, or a JSON or YAML file")
    parser.add_argument("--machine", default="{}", help="JSON, or a file: how to run, not what")
    parser.add_argument("--identity", required=True, help="the target's identity.json")
    parser.add_argument("--features", required=True, nargs="+", help="manifests of feature shards")
    parser.add_argument("--tokens", nargs="*", default=[], help="their token files, for kinds")
    parser.add_argument("--name", required=True, help="the drafter's name")
    parser.add_argument("--runs", required=True, type=Path, help="folder that keeps checkpoints")
    parser.add_argument("--out", required=True, type=Path, help="folder of the finished drafter")
    parser.add_argument("--threads", type=int, help="CPU threads, of all processes of a node")
    parser.add_argument(
        "--changed",
        choices=("refuse", "fresh"),
        default="refuse",
        help="where --runs holds a training with other settings, features or code only: refuse, naming "
        "what differs, or start a new one beside it",
    )
    with ranks.said_once():
        args = parser.parse_args(argv)
    # Packs differ in size from step to step: segments that can grow keep free memory in one piece. Read
    # by torch at the first allocation on a GPU, here or in the processes started below.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if not ranks.launched():  # those that are check it together
        gpus = machine_of(args).gpu
        ranks.start_others(gpus, "dflash.train", sys.argv[1:] if argv is None else argv)
    if args.threads:
        here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        torch.set_num_threads(max(1, args.threads // here))
    with ranks.joined() as of:
        stage(args, of)


def machine_of(args: argparse.Namespace) -> config.TrainMachine:
    return config.check(config.TrainMachine, read_settings(args.machine), "machine.train")


def stage(args: argparse.Namespace, of: Ranks) -> None:
    """Check everything, train, and let rank 0 write the outputs."""
    machine = machine_of(args)
    where = f"drafters.{args.name}"
    raw = read_settings(args.settings)
    own = {k: v for k, v in raw.items() if k not in ("stage", "version", "trust_remote_code")}
    settings = config.check(config.Drafter, own, where)
    identity = target.read_identity(args.identity)
    # Once more, with what the target itself says: stated facts may know fewer end tokens.
    facts = {name: getattr(identity, name) for name in config.TargetFacts.model_fields}
    config.check_against_target(settings, config.TargetFacts(**facts), where)
    if machine.attention == "flex" and of.device.type != "cuda":
        raise UserError(
            "machine.train.attention: found flex, which trains on CUDA devices only, and there is none here; "
            "use split"
        )
    taps = config.tap_ids(settings, identity.num_hidden_layers)
    asks_target = config.needs_last_hidden(settings)
    shards, positions = open_features(sorted(args.features), identity, taps, asks_target, of.say)
    kinds = kinds_of(args.tokens)
    start = start_folder(settings, where)
    if start is not None:
        found = read_drafter_config(start)
        config.check_start(settings, config.TargetFacts(**facts), found, where)

    run, held = None, nullcontext()
    if of.first:
        share = {"trust_remote_code": True} if raw.get("trust_remote_code") else {}
        share |= json.loads(config.canonical(config.train_share(settings)))  # lists, as in files
        decides = checkpoint.fingerprint(share, identity, shards, start)
        run = checkpoint.run_directory(args.runs, decides, args.changed == "fresh")
        held = checkpoint.lock(run)
    with held:
        run = of.told(run)
        trust = bool(raw.get("trust_remote_code", False))
        trainer = Trainer(
            settings, machine, identity, shards, positions, run, of, trust, start, kinds
        )
        try:
            drafter, known = trainer.run()
        except Interrupted:
            of.say(f"interrupted; saved in {run}: run the same command again to go on")
            raise SystemExit(STATUS_INTERRUPTED) from None
        if not of.first:
            return
        with whole(args.out, folder=True) as folder:
            save_drafter(folder, drafter, "float32")
            shape = {
                "name": args.name,
                "run": run.name,
                "settings": settings.model_dump(mode="json"),
            }
            write_json(folder / "training.json", {**shape, **known})
    last, best = known["history"][-1] if known["history"] else {}, known["best"]
    print(
        f"trained {args.name}: {known['steps']} steps, loss {last.get('loss')}, "
        + (f"tau {best['tau_mean']:.3f} on validation at step {best['step']}; " if best else "")
        + f"waited for data {known['shares']['data']:.1%} of the time; in {args.out}"
    )


if __name__ == "__main__":
    entrypoint(main)
