"""Train one drafter on the target's stored hidden states.

    python -m dflash.train --settings S --machine M --identity results/target/identity.json \\
        --features results/features/*/*.json --name demo --run results/runs/demo --out results/drafters/demo

Checkpoints go to a run directory named by a fingerprint of everything that decides the result
(settings, features, target), so that a killed job goes on from its last checkpoint and a changed
setting never meets another run's state. The outputs (float32 weights, config.json, training.json)
appear at the end, whole. In float32 on a CPU a resumed run gives bit for bit the uninterrupted one.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import shutil
import signal
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from dflash import attention, config, data, kernels, loader, loss, target
from dflash.drafter import (
    BEFORE_MLP,
    DTYPES,
    Drafter,
    DrafterConfig,
    block_input,
    config_text,
    load_drafter,
    read_drafter_config,
    save_drafter,
    start_from_target,
    target_record,
)
from dflash.errors import UserError, entrypoint
from dflash.features import open_shard, store_identity
from dflash.files import (
    read_json,
    read_settings,
    save_tensors,
    sha256,
    text_sha256,
    whole,
    write_json,
)
from dflash.progress import progress

STATUS_INTERRUPTED = 75  # EX_TEMPFAIL: saved, run the same command again
LOG_EVERY = 10  # steps


def drafter_config(
    settings: config.Drafter, identity: target.Identity, start: DrafterConfig | None = None
) -> DrafterConfig:
    """The shape of a drafter: what its settings say, and the target's own where they do not, or
    that of the drafter it starts from (which `config.check_start` has seen)."""
    t = identity
    ids = config.tap_ids(settings, t.num_hidden_layers)
    layers = settings.num_hidden_layers
    heads = settings.num_attention_heads or t.num_attention_heads
    of_target = DrafterConfig(
        hidden_size=t.hidden_size,
        intermediate_size=settings.intermediate_size or t.intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=settings.num_key_value_heads or t.num_key_value_heads,
        head_dim=settings.head_dim or t.head_dim,
        rms_norm_eps=t.rms_norm_eps,
        rope_theta=settings.rope_theta or t.rope_theta,
        max_position_embeddings=t.max_position_embeddings,
        vocab_size=t.vocab_size,
        block_size=settings.block_size,
        mask_token_id=settings.mask_token_id,
        target_layer_ids=tuple(ids),
        num_target_layers=t.num_hidden_layers,
        layer_types=("sliding_attention" if settings.sliding_window else "full_attention",)
        * layers,
        sliding_window=settings.sliding_window,
        bos_token_id=t.bos_token_id,
        eos_token_id=t.eos_token_ids[0] if len(t.eos_token_ids) == 1 else list(t.eos_token_ids),
        pad_token_id=t.pad_token_id,
        trained_for=target_record(t),
    )
    if start is None:
        return of_target
    kept = ("block_size", "num_target_layers", "bos_token_id", "eos_token_id", "pad_token_id")
    return replace(start, **{k: getattr(of_target, k) for k in (*kept, "trained_for")})


def start_folder(settings: config.Drafter, where: str) -> Path | None:
    """The folder of the drafter that this one starts from, fetched from the hub if it lies there."""
    if settings.start in ("target", "random"):
        return None
    if config.is_folder(settings.start):
        return Path(settings.start)
    return target.fetch(settings.start, f"{where}.start")[0]


def new_drafter(
    settings: config.Drafter,
    identity: target.Identity,
    trust_remote_code: bool = False,
    start: Path | None = None,
) -> Drafter:
    """A drafter with its initial weights, a function of settings, target and the drafter in the
    folder `start`, if any."""
    if start is not None:
        drafter = load_drafter(start)
        drafter.config = drafter_config(settings, identity, drafter.config)
        return drafter.requires_grad_(True)
    drafter = Drafter(drafter_config(settings, identity))
    drafter.init_weights(settings.training.seed)
    if settings.start == "target":
        count, last = settings.num_hidden_layers, identity.num_hidden_layers
        layers = list(range(last - count, last)) if count <= last else list(range(last))
        prefix = identity.embedding_tensor.removesuffix("embed_tokens.weight")
        names = [f"{prefix}norm.weight"]
        names += [
            f"{prefix}layers.{i}.{name.split('.', 2)[2]}"
            for i in layers
            for name in drafter.state_dict()
            if name.startswith("layers.0.")
        ]
        names += [name.replace(*BEFORE_MLP) for name in names if BEFORE_MLP[0] in name]
        tensors = target.load_tensors(identity, names, optional=True)
        try:
            offset = target.norm_offset(identity, trust_remote_code)
        except UserError:  # a norm of an unknown kind; its gains are taken as they are
            offset = 0
        start_from_target(drafter, tensors, layers, prefix, offset)
    return drafter


def learning_rate(step: int, steps: int, training: config.Training) -> float:
    """Linear warm-up over its share of the steps, then a cosine to zero at the last one."""
    warm = math.ceil(training.warmup_share * steps)
    if step < warm:
        return training.lr * (step + 1) / warm
    return training.lr * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def make_optimizer(drafter: nn.Module, training: config.Training) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only."""
    matrices = [p for p in drafter.parameters() if p.dim() > 1]
    vectors = [p for p in drafter.parameters() if p.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": training.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=training.lr, betas=tuple(training.betas), fused=True)


def weights_of_slots(settings: config.Drafter) -> torch.Tensor:
    """Weight of each slot before any D-PACE factor, whose sums are the weight mass; float32 [B]."""
    decays = settings.training.loss.weights == "decay"
    return loss.slot_weights(settings.block_size, config.gamma(settings) if decays else math.inf)


class Head:
    """The target's frozen embedding table and head, the latter perhaps reduced to frequent tokens,
    and its final norm and the cap of its logits where its own distribution is asked for."""

    def __init__(
        self,
        embed_VH: torch.Tensor,
        head_VH: torch.Tensor,
        dtype: torch.dtype,
        norm: nn.Module | None = None,
        cap: float | None = None,
    ):
        self.embed_VH, self.head_VH = embed_VH, head_VH.to(dtype)
        self.norm = norm.to(head_VH.device, dtype) if norm is not None else None
        self.cap = cap
        self.row_of: torch.Tensor | None = None

    def reduce(self, tokens: np.ndarray) -> None:
        """Keep only these tokens' rows; other labels become unsupervised."""
        ids = torch.from_numpy(tokens).to(self.head_VH.device)
        row_of = torch.full((self.head_VH.shape[0],), -1, device=ids.device)
        row_of[ids] = torch.arange(len(ids), device=ids.device)
        self.head_VH, self.row_of = self.head_VH[ids].contiguous(), row_of.cpu()

    def relabel(self, pack: data.Pack) -> int:
        """Labels as rows of the reduced head. Returns how many lost their supervision."""
        if self.row_of is None:
            return 0
        labels = pack.labels_NB
        rows = torch.where(labels >= 0, self.row_of[labels.clamp_min(0)], -1)
        lost = (labels >= 0) & (rows < 0)
        pack.labels_NB = rows
        pack.weights_NB = torch.where(rows >= 0, pack.weights_NB, 0.0)
        return int(lost.sum())


def pack_loss(
    drafter: Drafter,
    pack: data.Pack,
    head: Head,
    training: config.Training,
    machine: config.TrainMachine,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted sum of the slot losses of a pack, and which slots the drafter got right.

    Returns (sum [], correct bool [N, B], false where nothing is supervised).
    """
    dtype, kind = DTYPES[training.dtype], training.loss
    c = drafter.config
    device = next(drafter.parameters()).device
    block = block_input(
        head.embed_VH, pack.anchor_tokens_N.to(device), c.block_size, c.mask_token_id
    ).float()
    with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
        taps = pack.taps_SD.to(device, non_blocking=True)
        hidden = drafter(
            taps if dtype == torch.bfloat16 else taps.float(),
            block,
            pack.layout,
            machine.attention,
            machine.checkpointing,
            machine.reentrant,
        )
    teacher = None
    if kind.labels != "data":
        last = pack.last_SH.to(device, non_blocking=True)
        teacher = loss.Teacher(last, pack.target_rows_NB.to(device), head.norm, head.cap)
    return loss.block_loss(
        hidden,
        head.head_VH,
        pack.labels_NB.to(device),
        pack.weights_NB.to(device),
        machine.loss_rows,
        teacher,
        soft=kind.labels == "soft",
        dpace_alpha=kind.dpace_alpha if kind.weights == "dpace" else None,
    )


def make_pack(
    documents: list[data.Document],
    anchors_of: list[np.ndarray],
    slot_weights: torch.Tensor,
    drafter: Drafter,
    machine: config.TrainMachine,
    dtype: torch.dtype,
) -> data.Pack:
    """The documents as `pack_loss` wants them; `dtype` is that of the matrix products."""
    return data.pack(
        documents,
        anchors_of,
        slot_weights,
        group_rows(drafter, documents, machine, dtype),
        machine.pad_context,
        machine.pad_blocks,
        pin=next(drafter.parameters()).device.type == "cuda",
    )


def group_rows(
    drafter: Drafter,
    documents: list[data.Document],
    machine: config.TrainMachine,
    dtype: torch.dtype,
) -> int:
    """Slots in one attention group: as set, or as many as the memory target of the device allows."""
    if machine.group_rows is not None:
        return machine.group_rows
    c = drafter.config
    kind = next(drafter.parameters()).device.type
    limit = machine.group_mb * 2**20 if machine.group_mb else attention.group_bytes(kind)
    longest = max(len(d.input_ids) for d in documents)
    return attention.group_rows_within(
        limit,
        min(longest, c.sliding_window or longest),
        c.block_size,
        c.num_attention_heads,
        c.num_key_value_heads,
        c.head_dim,
        dtype.itemsize,
    )


def accepted_by_position(correct_NB: torch.Tensor) -> torch.Tensor:
    """Leading run of right slots of each block plus the bonus token; [N].

    Averaged over training positions this is an indication, not the acceptance length of decoding:
    predictable stretches hold many positions but few cycles.
    """
    return correct_NB[:, 1:].long().cumprod(-1).sum(-1) + 1


# --- checkpoints ------------------------------------------------------------------------------


def fingerprint(
    settings: dict[str, Any], identity: target.Identity, shards: list, start: Path | None = None
) -> dict[str, Any]:
    """Everything that decides the final weights."""
    found = {
        "settings": settings,
        "target": identity.weights_sha256,
        "features": sorted(f"{s.attributes['settings_sha256']}/{s.content_sha256}" for s in shards),
    }
    if start is not None:
        found["start"] = sha256(*sorted(start.glob("*.safetensors")), start / "config.json")
    return found


def lock(run: Path):
    """Keep other trainers out of a run directory; freed by the kernel when this process ends."""
    handle = open(run / "lock", "w")  # noqa: SIM115 (held until the process ends)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{run}: another trainer is running here; wait for it or stop it") from None
    return handle


def checkpoints(run: Path) -> list[Path]:
    """Finished checkpoints, oldest first."""
    return sorted(run.glob("step-*"))


def save_checkpoint(
    run: Path,
    step: int,
    drafter: Drafter,
    optimizer: torch.optim.Optimizer,
    sums: dict[str, float],
    keep_last: int,
) -> None:
    """Write the state after `step` steps, whole or not at all, and remove old ones.

    `sums` are those of the line of metrics that is not yet full.
    """
    by_param = {p: n for n, p in drafter.named_parameters()}
    moments = {
        f"{key}/{by_param[p]}": value.detach().cpu().contiguous()
        for p, state in optimizer.state.items()
        for key, value in state.items()
    }
    with whole(run / f"step-{step:08d}", folder=True) as folder:
        weights = {n: p.detach().cpu().contiguous() for n, p in drafter.named_parameters()}
        save_tensors(folder / "drafter.safetensors", weights)
        save_tensors(folder / "optimizer.safetensors", moments)
        write_json(folder / "state.json", {"step": step, "sums": sums})
    for old in checkpoints(run)[:-keep_last]:
        shutil.rmtree(old)


def load_checkpoint(
    folder: Path, drafter: Drafter, optimizer: torch.optim.Optimizer
) -> tuple[int, dict[str, float]]:
    """Restore weights and optimiser; returns the number of finished steps, and `sums` as saved."""
    try:
        state = read_json(folder / "state.json")
        step, sums = state["step"], state["sums"]
        weights = load_file(folder / "drafter.safetensors")
        moments = load_file(folder / "optimizer.safetensors")
        own = dict(drafter.named_parameters())
        with torch.no_grad():
            for name, p in own.items():
                p.copy_(weights[name])
        for key, value in moments.items():
            kind, name = key.split("/", 1)
            p = own[name]
            # fused AdamW keeps its step counter on the parameter's device
            optimizer.state[p][kind] = value.to(p.device)
    except (
        OSError,
        LookupError,
        TypeError,
        ValueError,
        UserError,
        SafetensorError,
        RuntimeError,
    ) as e:
        raise UserError(
            f"{folder}: damaged checkpoint ({e}); delete it to go on from the one before"
        ) from None
    return step, sums


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


# --- the stage --------------------------------------------------------------------------------


def open_features(
    manifests: list[str], identity: target.Identity, ids: list[int], last_hidden: bool = False
):
    """Open the shards behind some manifests, refuse those of another target, find our taps.

    With `last_hidden`, shards without the target's last hidden state are refused too.
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
        print(f"features: the shards were made in different ways ({'; '.join(sorted(made))})")
    return shards, positions[0]


def total_steps(documents: int, training: config.Training) -> int:
    """Optimiser steps of a training, at least one."""
    steps = max(1, round(training.epochs * documents / training.documents_per_step))
    return min(steps, training.max_steps or steps)


class Interrupted(Exception):
    """SIGTERM arrived: save and leave."""


def train(
    settings: config.Drafter,
    machine: config.TrainMachine,
    identity: target.Identity,
    shards: list,
    positions: list[int],
    run: Path,
    device: torch.device,
    trust_remote_code: bool = False,
    start: Path | None = None,
) -> tuple[Drafter, dict[str, Any]]:
    """Train to the end, from the last checkpoint in `run` if there is one, else from the drafter in
    `start` or from fresh weights.

    `trust_remote_code` is for the target's final norm, where its own distribution is asked for.
    Returns the drafter and what is known about its training.
    """
    training, dtype = settings.training, DTYPES[settings.training.dtype]
    asks_target = config.needs_last_hidden(settings)
    everywhere = training.loss.positions == "all"
    kept = None
    if training.loss.head_tokens:
        kept = loader.frequent_tokens(
            shards, training.loss.head_tokens, identity.vocab_size, everywhere
        )
    stream = loader.Stream(
        shards,
        positions,
        training.seed,
        training.anchors_per_document,
        settings.block_size,
        asks_target,
        everywhere,
        kept,
    )
    steps = total_steps(len(stream), training)
    embed, head_weight = target.load_embedding_and_head(identity)
    norm = target.load_final_norm(identity, trust_remote_code) if asks_target else None
    cap = target.load_softcap(identity, trust_remote_code)
    head = Head(embed.to(device), head_weight.to(device), dtype, norm, cap)
    if kept is not None:
        head.reduce(kept)
    slot_weights = weights_of_slots(settings)

    drafter = new_drafter(settings, identity, trust_remote_code, start).to(device).train()
    optimizer = make_optimizer(drafter, training)
    done = checkpoints(run)
    first, sums = load_checkpoint(done[-1], drafter, optimizer) if done else (0, {})
    history = cut_metrics(run, first)
    print(
        f"drafter: {config_text(drafter.config)}; {sum(p.numel() for p in drafter.parameters()):,} "
        f"weights on {device}, {settings.training.dtype}"
    )
    print(
        f"data: {len(stream)} documents ({stream.unusable} without a block left out, {stream.repeated} "
        f"repeated), {steps} steps of {training.documents_per_step} documents x up to "
        f"{training.anchors_per_document} blocks; head over {head.head_VH.shape[0]:,} tokens"
        + (f"; going on from step {first}" if first else "")
    )
    c = drafter.config
    found = kernels.of_backend(
        machine.attention,
        device,
        dtype,
        c.num_attention_heads,
        c.num_key_value_heads,
        c.head_dim,
    )
    used = ", ".join(f"{k.kernel} ({k.call})" for k in found)
    print(f"attention: {machine.attention}, kernel {used}; checkpointing: {machine.checkpointing}")
    if note := kernels.warning(found, machine.attention):
        print(note)
    if first == steps:
        print(f"this training is finished already; delete {run} to train it anew")

    terminated = []
    previous = signal.signal(signal.SIGTERM, lambda *_: terminated.append(True))
    if machine.pad_context is not None and machine.pad_blocks is not None:
        per_step = training.documents_per_step
        rows, blocks = stream.largest_pack(first, steps, per_step, machine.micro_batch)
        data.check_room(rows, blocks, machine.pad_context, machine.pad_blocks)
    plans = (
        stream.plan(step, training.documents_per_step, slot_weights) for step in range(first, steps)
    )
    loaded = loader.load(
        stream,
        plans,
        machine,
        lambda documents, anchors_of: make_pack(
            documents, anchors_of, slot_weights, drafter, machine, dtype
        ),
    )
    saved = begun = time.monotonic()
    waited = 0.0
    bar = progress(desc="train", total=steps, initial=first, unit="steps")
    try:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(run), purge_step=first + 1)
        log = open(run / "metrics.jsonl", "a", buffering=1)  # noqa: SIM115 (closed below)
        for plan, packs in loaded:
            step = plan.step
            row = one_step(
                drafter, optimizer, packs, plan.mass, head, step, steps, settings, machine
            )
            row["data_seconds"] = packs.seconds
            waited += packs.seconds
            for key, value in row.items():
                sums[key] = sums.get(key, 0.0) + value
            bar.update()
            if (step + 1) % LOG_EVERY == 0 or step + 1 == steps:
                entry = report_line(sums, step + 1, steps, training, stream, begun, first)
                log.write(json.dumps(entry) + "\n")
                for key in ("loss", "accepted_by_position", "gradient_norm", "lr"):
                    writer.add_scalar(key, entry[key], step + 1)
                history.append(entry)
                bar.set_postfix(
                    loss=f"{entry['loss']:.3f}",
                    accepted=entry["accepted_by_position"],
                    data=f"{waited / (time.monotonic() - begun):.1%}",
                    refresh=False,
                )
                sums = {}
            late = time.monotonic() - saved > 60 * machine.save_minutes
            if terminated or late or step + 1 == steps:
                save_checkpoint(run, step + 1, drafter, optimizer, sums, machine.keep_last)
                saved = time.monotonic()
            if terminated and step + 1 < steps:
                raise Interrupted
    finally:
        loaded.close()
        bar.close()
        signal.signal(signal.SIGTERM, previous)
    spent = max(time.monotonic() - begun, 1e-9)
    writer.close()
    log.close()
    facts = {
        "steps": steps,
        "documents": len(stream),
        "documents_without_block": stream.unusable,
        "documents_repeated": stream.repeated,
        "head_tokens": head.head_VH.shape[0],
        "weights": sum(p.numel() for p in drafter.parameters()),
        "data_share": round(
            waited / spent, 4
        ),  # of the time since this process took its first step
        "history": history,
    }
    return drafter, facts


def one_step(
    drafter: Drafter,
    optimizer: torch.optim.Optimizer,
    packs: Iterable[data.Pack],
    mass: float,
    head: Head,
    step: int,
    steps: int,
    settings: config.Drafter,
    machine: config.TrainMachine,
) -> dict[str, float]:
    """One optimiser step over some packs. Returns sums for the log.

    The loss is divided by the weight mass of the whole step (see `dflash.loss`), which is known
    before the first pack is made, so that packs of any size give the same gradient up to rounding
    and need not be there together.
    """
    training = settings.training
    optimizer.zero_grad(set_to_none=True)
    loss_sum, accepted, blocks, tokens, lost, sample_ids = 0.0, 0, 0, 0, 0, []
    for packed in packs:
        lost += head.relabel(packed)
        tokens += packed.real_rows
        sample_ids += packed.sample_ids
        if mass:  # 0 is possible only with a reduced head
            total, correct = pack_loss(drafter, packed, head, training, machine)
            (total / mass).backward()
            loss_sum += float(total.detach())
            accepted += int(accepted_by_position(correct[: packed.real_blocks]).sum())
            blocks += packed.real_blocks
            del total, correct
        del packed  # with its masks, before the next one comes
    learned = blocks > 0
    norm = float(nn.utils.clip_grad_norm_(drafter.parameters(), training.clip)) if learned else 0.0
    if not math.isfinite(loss_sum) or not math.isfinite(norm):
        raise UserError(
            f"step {step}: the loss or its gradient is not finite (loss {loss_sum}, gradient norm "
            f"{norm}; samples {', '.join(sample_ids)}); lower training.lr or check these samples' features"
        )
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, steps, training)
    if learned:
        optimizer.step()
    return {
        "loss": loss_sum,
        "mass": mass,
        "accepted": accepted,
        "blocks": blocks,
        "gradient_norm": norm,
        "tokens": tokens,
        "outside_head": lost,
        "count": 1,
    }


def report_line(
    sums: dict[str, float],
    step: int,
    steps: int,
    training: config.Training,
    stream: data.Stream,
    begun: float,
    first: int,
) -> dict[str, Any]:
    """One line of metrics.jsonl: averages over the steps since the last line.

    `data_seconds` is how long a step waited for its packs; `seconds_per_step` is since `begun`.
    """
    return {
        "step": step,
        "epoch": round(step * training.documents_per_step / len(stream), 3),
        "loss": round(sums["loss"] / max(sums["mass"], 1e-12), 5),
        "accepted_by_position": round(sums["accepted"] / max(sums["blocks"], 1), 4),
        "gradient_norm": round(sums["gradient_norm"] / sums["count"], 5),
        "lr": learning_rate(step - 1, steps, training),
        "tokens": sums["tokens"],
        "labels_outside_head": sums["outside_head"],
        "seconds_per_step": round((time.monotonic() - begun) / (step - first), 4),
        "data_seconds": round(sums["data_seconds"] / sums["count"], 4),
    }


def main(argv: list[str] | None) -> None:
    parser = argparse.ArgumentParser(prog="python -m dflash.train", description=__doc__)
    parser.add_argument("--settings", required=True, help="JSON, or a JSON or YAML file")
    parser.add_argument("--machine", default="{}", help="JSON, or a file: how to run, not what")
    parser.add_argument("--identity", required=True, help="the target's identity.json")
    parser.add_argument("--features", required=True, nargs="+", help="manifests of feature shards")
    parser.add_argument("--name", required=True, help="the drafter's name")
    parser.add_argument("--run", required=True, type=Path, help="folder that keeps checkpoints")
    parser.add_argument("--out", required=True, type=Path, help="folder of the finished drafter")
    parser.add_argument("--threads", type=int, help="CPU threads")
    args = parser.parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    raw = read_settings(args.settings)
    settings = config.check(
        config.Drafter,
        {k: v for k, v in raw.items() if k not in ("stage", "version", "trust_remote_code")},
        f"drafters.{args.name}",
    )
    machine = config.check(config.TrainMachine, read_settings(args.machine), "machine.train")
    identity = target.read_identity(args.identity)
    # Once more, with what the target itself says: stated facts may know fewer end tokens.
    facts = {name: getattr(identity, name) for name in config.TargetFacts.model_fields}
    config.check_against_target(settings, config.TargetFacts(**facts), f"drafters.{args.name}")
    taps = config.tap_ids(settings, identity.num_hidden_layers)
    asks_target = config.needs_last_hidden(settings)
    shards, positions = open_features(sorted(args.features), identity, taps, asks_target)

    start = start_folder(settings, f"drafters.{args.name}")
    if start is not None:
        found = read_drafter_config(start)
        config.check_start(settings, config.TargetFacts(**facts), found, f"drafters.{args.name}")

    print_of = fingerprint(raw, identity, shards, start)
    run = args.run / text_sha256(config.canonical(print_of))[:12]
    run.mkdir(parents=True, exist_ok=True)
    held = lock(run)
    write_json(run / "fingerprint.json", print_of)
    device = target.default_device()
    if machine.attention == "flex" and device.type != "cuda":
        raise UserError(
            "machine.train.attention: found flex, which trains on CUDA devices only, and there is none here; "
            "use split"
        )
    try:
        trust = bool(raw.get("trust_remote_code", False))
        drafter, facts = train(
            settings, machine, identity, shards, positions, run, device, trust, start
        )
    except Interrupted:
        print(f"interrupted; saved in {run}: run the same command again to go on")
        raise SystemExit(STATUS_INTERRUPTED) from None
    with whole(args.out, folder=True) as folder:
        save_drafter(folder, drafter, "float32")
        shape = {"name": args.name, "run": run.name, "settings": settings.model_dump(mode="json")}
        write_json(folder / "training.json", {**shape, **facts})
    held.close()
    last = facts["history"][-1] if facts["history"] else {}
    print(
        f"trained {args.name}: {facts['steps']} steps, loss {last.get('loss')}, accepted by position "
        f"{last.get('accepted_by_position')}; waited for data {facts['data_share']:.1%} of the time; "
        f"in {args.out}"
    )


if __name__ == "__main__":
    entrypoint(main)
