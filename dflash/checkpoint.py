"""The run directory of a training: its checkpoints, the one that accepts most, lock and fingerprint.

    results/runs/NAME/<hash of the fingerprint>/
        fingerprint.json    everything that decides the result
        lock                held by the trainer
        step-00000100/      state after so many steps: drafter.safetensors (float32 weights),
                            optimizer.safetensors, average.safetensors (with `ema`), state.json
        metrics.jsonl       lines of the log

A checkpoint appears whole or not at all, and says the sha256 of its files. Its step decides
everything else: the learning rate, the place in the stream of documents and their anchors are pure
functions of it, and nothing in training draws from a random generator. Nothing is ever unpickled.
"""

from __future__ import annotations

import fcntl
import json
import re
import shutil
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from dflash import config, ranks, target
from dflash.errors import UserError
from dflash.files import read_json, save_tensors, sha256, text_sha256, whole, write_json
from dflash.ranks import Ranks
from dflash.recipe import Average

FILES = ("drafter", "optimizer", "average")
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
    naming what differs. Raises UserError for a folder that is no such root.
    """
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


def checkpoints(run: Path) -> list[Path]:
    """Finished checkpoints, oldest first."""
    return sorted(run.glob("step-*"))


def folder_of(run: Path, step: int) -> Path:
    return run / f"step-{step:08d}"


def save(
    run: Path,
    state: dict[str, Any],
    drafter: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    average: Average | None,
    keep_last: int,
    of: Ranks,
) -> None:
    """Write the state after `state["step"]` steps, and remove what is not kept: all but the newest
    `keep_last` and the one that `state["best"]` names.

    Every rank has to call it; rank 0 writes.
    """
    names = {p: n for n, p in drafter.named_parameters()}
    tensors = {
        "drafter": {n: _whole(p) for n, p in drafter.named_parameters()},
        "optimizer": {
            f"{key}/{names[p]}": _whole(value)
            for optimizer in optimizers
            for p, moments in optimizer.state.items()
            for key, value in moments.items()
        },
    }
    if average is not None:
        tensors["average"] = {n: _whole(t) for n, t in average.tensors.items()}
    if not of.first:
        return
    with whole(folder_of(run, state["step"]), folder=True) as folder:
        hashes = {}
        for name, of_file in tensors.items():
            path = folder / f"{name}.safetensors"
            save_tensors(path, of_file)
            hashes[path.name] = sha256(path)
        write_json(folder / "state.json", {**state, "sha256": hashes})
    best = (state.get("best") or {}).get("step")
    for old in checkpoints(run)[:-keep_last]:
        if best is None or old != folder_of(run, best):
            shutil.rmtree(old)


def _whole(value: torch.Tensor) -> torch.Tensor:
    return ranks.full(value.detach()).cpu().contiguous()


def load(
    folder: Path,
    drafter: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    average: Average | None,
) -> dict[str, Any]:
    """Restore everything from a checkpoint; returns `state` as saved.

    Raises UserError for one that is damaged, by a single byte too.
    """
    owner = {
        name: (optimizer, p)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for p in group["params"]
        for name in [_name(drafter, p)]
    }
    try:
        state, tensors = read(folder)
        with torch.no_grad():
            for name, p in drafter.named_parameters():
                p.copy_(ranks.like(tensors["drafter"][name], p))
            if average is not None:
                for name, own in average.tensors.items():
                    own.copy_(ranks.like(tensors["average"][name], own))
        for key, value in tensors["optimizer"].items():
            kind, name = key.split("/", 1)
            optimizer, p = owner[name]
            # fused AdamW keeps its step counter on the parameter's device
            optimizer.state[p][kind] = ranks.like(value, p)
    except (LookupError, TypeError, RuntimeError) as e:
        raise _damaged(folder, e) from None
    return state


def _name(drafter: nn.Module, wanted: nn.Parameter) -> str:
    return next(n for n, p in drafter.named_parameters() if p is wanted)


def read(folder: Path) -> tuple[dict[str, Any], dict[str, dict[str, torch.Tensor]]]:
    """A checkpoint's state and the tensors of its files. Raises UserError when it is damaged."""
    try:
        state = read_json(folder / "state.json")
        hashes = state.pop("sha256")
        for name, wanted in hashes.items():
            if sha256(folder / name) != wanted:
                raise ValueError(f"{name} is not as it was written")
        tensors = {Path(name).stem: load_file(folder / name) for name in hashes}
        if not isinstance(state["step"], int) or not {"drafter", "optimizer"} <= {*tensors}:
            raise ValueError("state.json names no step or not all files")
    except (OSError, LookupError, TypeError, ValueError, UserError, SafetensorError) as e:
        raise _damaged(folder, e) from None
    return state, tensors


def _damaged(folder: Path, e: Exception) -> UserError:
    return UserError(f"{folder}: damaged checkpoint ({e}); delete it to go on from the one before")


def load_best(run: Path, step: int, drafter: nn.Module, averaged: bool) -> None:
    """Give a drafter the weights, or their average, of the checkpoint that was found the best."""
    folder = folder_of(run, step)
    _, tensors = read(folder)
    found = tensors["average" if averaged else "drafter"]
    with torch.no_grad():
        for name, p in drafter.named_parameters():
            p.copy_(found[name])


# --- the log --------------------------------------------------------------------------------------


def cut_metrics(run: Path, step: int) -> list[dict[str, Any]]:
    """Drop logged lines after the restored step; returns the kept ones."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    kept = []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            break  # a kill in the middle of a line
        if row["step"] <= step:
            kept.append(row)
    with whole(path) as temporary:
        temporary.write_text("".join(json.dumps(r) + "\n" for r in kept))
    return kept
