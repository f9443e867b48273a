"""One training step's gradient: the losses of some packs of documents, and what is counted on the way.

Shapes: N blocks · B slots of a block · S context rows · V rows of the head · H hidden width.

Imports no settings when it runs: `benchmarks/gpu_check.sh` takes steps where only torch and numpy are.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from dflash import attention, data, loss, paper, ranks
from dflash.drafter import DTYPES, Drafter, block_input

if TYPE_CHECKING:
    from dflash import config
    from dflash.monitor import Clock


def weights_of_slots(settings: config.Drafter, block_size: int | None = None) -> torch.Tensor:
    """Weight of each slot before any D-PACE factor, whose sums are the weight mass; float32 [B]."""
    block = block_size or settings.block_size
    kind = settings.training.loss
    gamma = paper.gamma(block) if kind.gamma is None else kind.gamma
    return loss.slot_weights(block, gamma if kind.weights == "decay" else math.inf)


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
        self.whole_VH = self.head_VH
        self.norm = norm.to(head_VH.device, dtype) if norm is not None else None
        self.cap = cap
        self.row_of: torch.Tensor | None = None

    def reduce(self, tokens: np.ndarray) -> None:
        """Learn with these tokens' rows only; other labels become unsupervised."""
        ids = torch.from_numpy(tokens).to(self.head_VH.device)
        row_of = torch.full((self.head_VH.shape[0],), -1, device=ids.device)
        row_of[ids] = torch.arange(len(ids), device=ids.device)
        self.head_VH, self.row_of = self.head_VH[ids].contiguous(), row_of.cpu()

    def relabel(self, pack: data.Pack) -> int:
        """Labels as rows of the reduced head. Returns how many lost their supervision (`outside_head`)."""
        if self.row_of is None:
            return 0
        labels = pack.labels_NB
        rows = torch.where(labels >= 0, self.row_of[labels.clamp_min(0)], -1)
        lost = (labels >= 0) & (rows < 0)
        pack.labels_NB = rows
        pack.weights_NB = torch.where(rows >= 0, pack.weights_NB, 0.0)
        pack.outside_head = int(lost.sum())
        return pack.outside_head


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
    device = head.embed_VH.device
    pack = pack.to(device)
    block = block_input(
        head.embed_VH,
        pack.anchor_tokens_N,
        pack.labels_NB.shape[1],
        drafter.config.mask_token_id,
    ).float()
    with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
        taps = pack.taps_SD
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
        teacher = loss.Teacher(pack.last_SH, pack.target_rows_NB, head.norm, head.cap)
    return loss.block_loss(
        hidden,
        head.head_VH,
        pack.labels_NB,
        pack.weights_NB,
        machine.loss_rows,
        teacher,
        soft=kind.labels == "soft",
        dpace_alpha=kind.dpace_alpha if kind.weights == "dpace" else None,
        at_R=pack.at_R,
    )


def make_pack(
    documents: list[data.Document],
    anchors_of: list[np.ndarray],
    slot_weights_B: torch.Tensor,
    drafter: Drafter,
    machine: config.TrainMachine,
    dtype: torch.dtype,
    head: Head | None = None,
) -> data.Pack:
    """The documents as `pack_loss` wants them; `dtype` is that of the matrix products, `head` gives the
    labels their rows. All that the host can do is done here, in a thread of the loader."""
    pin = next(drafter.parameters()).device.type == "cuda"
    packed = data.pack(
        documents,
        anchors_of,
        slot_weights_B,
        group_rows(drafter, documents, machine, dtype),
        machine.pad_context,
        machine.pad_blocks,
        pin,
    )
    if head is not None:
        head.relabel(packed)
    if machine.attention in ("split", "chunked"):
        for layer in range(drafter.config.num_hidden_layers):
            packed.layout.groups(drafter.config.visibility(layer))
    packed.stage(pin)
    return packed


def group_rows(
    drafter: Drafter,
    documents: list[data.Document],
    machine: config.TrainMachine,
    dtype: torch.dtype,
) -> int:
    """Slots in one attention group: as set, or as many as the memory target of the device allows."""
    if machine.group_rows is not None:
        return machine.group_rows
    kind = next(drafter.parameters()).device.type
    limit = machine.group_mb * 2**20 if machine.group_mb else attention.group_bytes(kind)
    longest = max(len(d.input_ids) for d in documents)
    return drafter.config.group_rows(limit, longest, drafter.config.block_size, dtype.itemsize)


def accepted_by_position(correct_NB: torch.Tensor) -> torch.Tensor:
    """Leading run of right slots of each block plus the bonus token; [N].

    Averaged over training positions this is an indication, not the acceptance length of decoding:
    predictable stretches hold many positions but few cycles (`dflash.validate` walks them).
    """
    return correct_NB[:, 1:].long().cumprod(-1).sum(-1) + 1


@dataclass
class Counted:
    """Sums over the packs of a step, or of several steps and ranks."""

    loss: float = 0.0  # not yet divided by the mass
    accepted: float = 0.0  # tokens that blocks would gain, the bonus among them
    first: float = 0.0  # blocks whose first slot is right
    blocks: float = 0.0
    tokens: float = 0.0
    slots: float = 0.0  # that may teach something
    supervised: float = 0.0  # of these, those that do
    outside_head: float = 0.0  # of the others, those whose label the reduced head lacks
    sample_ids: list[str] = field(default_factory=list)  # whose loss is no number


def accumulate(
    drafter: Drafter,
    packs: Iterable[data.Pack],
    mass: float,
    head: Head,
    training: config.Training,
    machine: config.TrainMachine,
    clock: Clock,
) -> Counted:
    """Add the gradient of some packs to that of the weights.

    The loss is divided by the weight mass of the whole step on all ranks (see `dflash.loss`), which
    is known before the first pack is made, so that packs of any size on any rank give the same
    gradient up to rounding and need not be there together.
    """
    sums, counted, names = Counted(), [], []
    device = head.embed_VH.device
    for packed in on_device(packs, device):
        sums.outside_head += packed.outside_head
        sums.tokens += packed.real_rows
        if mass:  # 0 is possible only with a reduced head
            with clock("forward"):
                total, correct = pack_loss(drafter, packed, head, training, machine)
            with clock("backward"):
                (total / mass).backward()
            right = correct[: packed.real_blocks]
            figures = total.detach(), accepted_by_position(right).sum(), right[:, 1].sum()
            counted.append(torch.stack([x.double() for x in figures]))
            names.append(packed.sample_ids)
            sums.blocks += packed.real_blocks
            sums.slots += right[:, 1:].numel()
            sums.supervised += packed.at_R.numel()
            del total, correct, right, figures
        del packed  # with its masks, before the next one comes
    # The only time in a step that the host waits for all that it has queued.
    for found, sample_ids in zip(
        torch.stack(counted).tolist() if counted else [], names, strict=True
    ):
        value, accepted, first = found
        if not math.isfinite(value):
            sums.sample_ids += sample_ids
        sums.loss += value
        sums.accepted += int(accepted)
        sums.first += int(first)
    return sums


def gradient_norm(drafter: nn.Module, clip: float) -> float:
    """The norm of the gradient of all weights, which then is at most `clip`.

    One that is no number leaves the gradients as they are: scaling by it would spread it to all.
    """
    parameters = list(drafter.parameters())
    total = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    norm = float(ranks.full(total))
    if math.isfinite(norm):
        nn.utils.clip_grads_with_norm_(parameters, clip, total)
    return norm


def on_device(packs: Iterable[data.Pack], device: torch.device) -> Iterator[data.Pack]:
    """The packs for passes on a device.

    To a GPU a pack is copied on a stream of its own while the one before it is computed. The host runs
    ahead by two packs at most, so that no more lie there.
    """
    if device.type != "cuda":
        yield from (packed.to(device) for packed in packs)
        return
    copies, computed = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    passed: deque[torch.cuda.Event] = deque()
    for packed in packs:
        if len(passed) == 2:
            passed.popleft().synchronize()
        with torch.cuda.stream(copies):
            moved = packed.to(device)
        computed.wait_stream(copies)
        for tensor in moved.tensors:
            tensor.record_stream(computed)
        yield moved
        del moved
        passed.append(computed.record_event())
