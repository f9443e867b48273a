"""The run directory of a training: its checkpoints, the one that accepts most, lock and fingerprint.

    results/runs/NAME/<hash of the fingerprint>/
        fingerprint.json    everything that decides the result
        lock                held by the trainer
        step-00000100/      state after so many steps: drafter.safetensors (float32 weights),
                            optimizer.safetensors, average.safetensors (with `ema`), state.json,
                            and sha256.json, the hashes of these
        metrics.jsonl       lines of the log

A checkpoint appears whole or not at all. Its step decides everything else: the learning rate, the
place in the stream of documents and their anchors are pure functions of it, and nothing in training
draws from a random generator. Nothing is ever unpickled.
"""

from __future__ import annotations

import fcntl
import json
import re
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from dflash import config, ranks, target
from dflash.errors import UserError, explain_oserror
from dflash.files import read_json, save_tensors, sha256, text_sha256, whole, write_json
from dflash.ranks import Ranks
from dflash.recipe import Average

OURS = re.compile(r"[0-9a-f]{12}")  # names of run directories


# --- which run directory --------------------------------------------------------------------------


def fingerprint(
    settings: dict[str, Any], identity: target.Identity, shards: list, start: Path | None = None
) -> dict[str, Any]:
    """Everything that decides the final weights."""
    found = {
        "code": config.STAGE_VERSION["train"],
        "settings": settings,
        "target": identity.weights_sha256,
        "features": sorted(f"{s.attributes['settings_sha256']}/{s.content_sha256}" for s in shards),
    }
    if start is not None:
        found["start"] = sha256(*sorted(start.glob("*.safetensors")), start / "config.json")
    return found


def run_directory(root: Path, found: dict[str, Any], fresh: bool) -> Path:
    """The directory of the training with this fingerprint in `root`.

    If `root` holds trainings with others only, a new one is begun if `fresh`, and else refused,
    naming what differs. Raises UserError for what is no such root.
    """
    if root.exists() and not root.is_dir():
        raise UserError(f"{root}: a file, not a folder of training runs; give --runs a new folder")
    root.mkdir(parents=True, exist_ok=True)
    strange = sorted(
        p.name for p in root.iterdir() if not OURS.fullmatch(p.name) and not p.name.startswith(".")
    )
    if strange:
        raise UserError(
            f"{root}: not a folder of training runs, it holds {', '.join(strange[:3])}; give --runs a "
            "new or empty folder"
        )
    run = root / text_sha256(config.canonical(found))[:12]
    others = [p for p in root.glob("*/fingerprint.json") if p.parent != run]
    if others and not (run / "fingerprint.json").exists():
        newest = max(others, key=lambda p: p.stat().st_mtime)
        changed = "; ".join(differences(read_json(newest), found))
        if not fresh:
            raise UserError(
                f"{newest.parent}: a training with something else ({changed}); put that back to go on "
                "with it, or start a new one beside it with --changed fresh"
            )
        print(f"not going on with {newest.parent}, in which something differs: {changed}")
    run.mkdir(exist_ok=True)
    write_json(run / "fingerprint.json", found)
    return run


def differences(old: Any, new: Any, key: str = "") -> list[str]:
    """Where two fingerprints differ, field by field."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted({*old, *new})
        parts = [differences(old.get(k), new.get(k), f"{key}.{k}" if key else k) for k in keys]
        return [sentence for part in parts for sentence in part]
    if old == new:
        return []
    if key == "features" and isinstance(old, list) and isinstance(new, list):
        gone, came = len({*old} - {*new}), len({*new} - {*old})
        return [f"features: {gone} of its {len(old)} shards are not among these, {came} are new"]
    show = [json.dumps(v) for v in (old, new)]
    return [f"{key}: {show[0][:60]} there, {show[1][:60]} here"]


def lock(run: Path) -> IO[str]:
    """Keep other trainers out of a run directory; freed by the kernel when this process ends."""
    handle = open(run / "lock", "w")  # noqa: SIM115 (held until the process ends)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        raise UserError(f"{run}: another trainer is running here; wait for it or stop it") from None
    return handle


# --- checkpoints ----------------------------------------------------------------------------------


@dataclass
class State:
    """What a checkpoint says beside the tensors."""

    step: int = 0  # finished steps
    validated: int = 0  # after how many of them the drafter was last measured
    best: dict[str, Any] | None = None  # step and tau_mean of the best validation so far
    skipped: int = 0  # steps left out, whose loss or gradient was no number
    sums: dict[str, float] = field(default_factory=dict)  # of the line that is not yet full

    def add(self, row: dict[str, float]) -> None:
        self.sums = {key: self.sums.get(key, 0.0) + value for key, value in row.items()}


def checkpoints(run: Path) -> list[Path]:
    """Finished checkpoints, oldest first."""
    return sorted(run.glob("step-*"))


def folder_of(run: Path, step: int) -> Path:
    return run / f"step-{step:08d}"


def save(
    run: Path,
    state: State,
    drafter: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    average: Average | None,
    keep_last: int,
    of: Ranks,
) -> None:
    """Write the state after `state.step` steps, and remove what is not kept: all but the newest
    `keep_last` and the best that any of these names, so that each can be gone on from.

    Every rank has to call it; rank 0 writes, and it alone keeps sharded tensors whole. Raises UserError
    when the disk does not take it; the checkpoints before are as they were.
    """
    names = {p: n for n, p in drafter.named_parameters()}

    def of_first(value: torch.Tensor) -> torch.Tensor | None:
        value = ranks.full(value.detach())
        return value.cpu().contiguous() if of.first else None

    tensors = {
        "drafter": {n: of_first(p) for n, p in drafter.named_parameters()},
        "optimizer": {
            f"{key}/{names[p]}": of_first(value)
            for optimizer in optimizers
            for p, moments in optimizer.state.items()
            for key, value in moments.items()
        },
    }
    if average is not None:
        tensors["average"] = {n: of_first(t) for n, t in average.tensors.items()}
    if not of.first:
        return
    _sweep(run)
    path = folder_of(run, state.step)
    try:
        with whole(path, folder=True) as folder:
            for name, of_file in tensors.items():
                save_tensors(folder / f"{name}.safetensors", of_file)
            write_json(folder / "state.json", asdict(state))
            hashes = {file.name: sha256(file) for file in sorted(folder.iterdir())}
            write_json(folder / "sha256.json", hashes)
    except OSError as e:
        raise UserError(f"{path}: cannot be saved: {explain_oserror(e)}") from None
    kept = checkpoints(run)[-keep_last:]
    bests = [read_json(folder / "state.json")["best"] for folder in kept]
    kept += [folder_of(run, best["step"]) for best in bests if best is not None]
    for old in checkpoints(run):
        if old not in kept:
            old.rename(run / f".{old.name}.partial")  # half a checkpoint never has its name
    _sweep(run)


def _sweep(run: Path) -> None:
    """Remove the folders that are no checkpoints any more, or never became any before a kill."""
    for folder in run.glob(".*.partial"):
        if folder.is_dir():
            shutil.rmtree(folder, ignore_errors=True)


def load(
    folder: Path,
    drafter: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    average: Average | None,
) -> State:
    """Restore everything from a checkpoint; returns its state as saved.

    Raises UserError for one that is damaged, by a single byte too, or another drafter's.
    """
    state, tensors = read(folder)
    weights = dict(drafter.named_parameters())
    owner = {
        p: optimizer
        for optimizer in optimizers
        for group in optimizer.param_groups
        for p in group["params"]
    }
    try:
        _restore(weights, tensors["drafter"])
        if average is not None:
            _restore(average.tensors, tensors["average"])
        for key, value in tensors["optimizer"].items():
            kind, name = key.split("/", 1)
            p = weights[name]
            if value.dim():  # not AdamW's count of steps
                _check_shape(key, value, p)
            # fused AdamW keeps its step counter on the parameter's device
            owner[p].state[p][kind] = ranks.like(value, p)
    except (LookupError, ValueError) as e:
        raise _refused(folder, "checkpoint of another training", e) from None
    return state


@torch.no_grad()
def _restore(own: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    """Copy tensors into those of the same names. Raises ValueError where the two do not fit."""
    if strange := sorted(own.keys() ^ found.keys()):
        raise ValueError(f"{strange[0]} is only {'there' if strange[0] in found else 'here'}")
    for name, tensor in own.items():
        _check_shape(name, found[name], tensor)
        tensor.copy_(ranks.like(found[name], tensor))


def _check_shape(name: str, found: torch.Tensor, own: torch.Tensor) -> None:
    if found.shape != own.shape:
        raise ValueError(f"{name} is {list(found.shape)} there, {list(own.shape)} here")


AGAIN = "delete it to go on from the one before"


def read(folder: Path, remedy: str = AGAIN) -> tuple[State, dict[str, dict[str, torch.Tensor]]]:
    """A checkpoint's state and the tensors of its files. Raises UserError when it is damaged."""
    try:
        hashes = json.loads((folder / "sha256.json").read_text())
        for name, wanted in hashes.items():
            if sha256(folder / name) != wanted:
                raise ValueError(f"{name} is not as it was written")
        state = State(**json.loads((folder / "state.json").read_text()))
        files = (folder / name for name in hashes if name.endswith(".safetensors"))
        tensors = {path.stem: load_file(path) for path in files}
        if not {"state.json", "drafter.safetensors", "optimizer.safetensors"} <= hashes.keys():
            raise ValueError("sha256.json does not name all files")
    except (OSError, AttributeError, TypeError, ValueError, SafetensorError) as e:
        raise _refused(folder, "damaged checkpoint", e, remedy) from None
    return state, tensors


def _refused(folder: Path, what: str, e: Exception, remedy: str = AGAIN) -> UserError:
    return UserError(f"{folder}: {what} ({e}); {remedy}")


def load_best(run: Path, step: int, drafter: nn.Module, averaged: bool) -> None:
    """Give a drafter the weights, or their average, of the checkpoint that was found the best.

    Raises UserError when it is damaged or gone.
    """
    remedy = "delete it and all later ones to train on from the one before"
    _, tensors = read(folder_of(run, step), remedy)
    _restore(dict(drafter.named_parameters()), tensors["average" if averaged else "drafter"])


# --- the log --------------------------------------------------------------------------------------


def cut_metrics(run: Path, step: int, validated: int) -> list[dict[str, Any]]:
    """Drop logged lines after the restored step, and validations after the restored one, which will be
    measured again; returns the kept ones."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    kept = []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            break  # a kill in the middle of a line
        if row["step"] <= (validated if "tau_mean" in row else step):
            kept.append(row)
    with whole(path) as temporary:
        temporary.write_text("".join(json.dumps(r) + "\n" for r in kept))
    return kept
