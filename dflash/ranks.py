"""The processes of one training: one, or as many as torchrun has started.

Each rank reads its own documents of a step and adds their gradients; one sum over all ranks before
the optimiser makes them the step's. No wrapper counts backward passes, so a rank without any block
takes part with zeros and holds up nobody, and every rank holds the same weights bit for bit. With
`shard` (FSDP2) a rank keeps a part of each weight instead; then all have to run as many passes.

NCCL on GPUs, gloo on CPUs. What is said, and what is written, is rank 0's.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from dflash import PARENT
from dflash.drafter import Drafter
from dflash.errors import UserError, sentence

T = TypeVar("T")
STATUS_INTERRUPTED = 75  # EX_TEMPFAIL: saved, run the same command again
GRACE_S = 30.0  # between SIGTERM and SIGKILL, as torchrun has it

# Keys in the processes' store.
FAILED, SAID = "dflash/failed", "dflash/said"  # who failed first; whether it has said why


@dataclass(frozen=True)
class Ranks:
    """Which of how many processes this is, and where it computes."""

    rank: int
    world: int
    device: torch.device
    sharded: bool = False

    @property
    def first(self) -> bool:
        """Whether this process speaks and writes."""
        return self.rank == 0

    def say(self, *words: object) -> None:
        if self.first:
            print(*words)

    def sum(self, numbers: list[float]) -> list[float]:
        """The sums over all ranks, in float64."""
        if self.world == 1:
            return numbers
        total = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()

    def sum_gradients(self, drafter: nn.Module) -> None:
        """Make every rank's gradients those of all. FSDP2 has done so in the backward pass."""
        if self.world == 1 or self.sharded:
            return
        waiting = []
        for p in drafter.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            waiting.append(dist.all_reduce(p.grad, async_op=True))
        for work in waiting:
            work.wait()

    def gather(self, mine: list[T]) -> list[T]:
        """The lists of all ranks, one after the other."""
        if self.world == 1:
            return mine
        lists: list[Any] = [None] * self.world
        dist.all_gather_object(lists, mine)
        return [item for part in lists for item in part]

    def told(self, data: T) -> T:
        """What rank 0 has."""
        if self.world == 1:
            return data
        found = [data]
        dist.broadcast_object_list(found, src=0)
        return found[0]

    def meet(self) -> None:
        """Wait until every rank is here."""
        self.sum([0.0])


def launched() -> bool:
    """Whether torchrun has started this process."""
    return "RANK" in os.environ


@contextmanager
def said_once() -> Iterator[None]:
    """What is printed meanwhile is rank 0's, before the ranks have joined."""
    if os.environ.get("RANK", "0") == "0":
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def device_of_rank() -> torch.device:
    """The GPU with this process's number on its node, or the CPU. Raises UserError without one left."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    number, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if number >= count:
        raise UserError(
            f"process {number} of this node, counted from 0, has no GPU: found {count}; start as many "
            "processes as there are GPUs (torchrun --nproc-per-node gpu)"
        )
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def one(device: torch.device | None = None) -> Ranks:
    """This process alone."""
    return Ranks(0, 1, device or device_of_rank())


@contextmanager
def joined(minutes: float = 30.0) -> Iterator[Ranks]:
    """This process among those that torchrun started, or alone.

    An error in one of them ends all with status 2, and is said once: by the rank that was the first
    to fail. A `SystemExit` has to be agreed upon: all leave with it together. `minutes` is how long
    the others wait for a rank that neither answers nor ends.

    gloo notices at once that a rank is gone. NCCL may wait for it until that time is over, but all
    numbers go over gloo, a step's before its gradients; so NCCL meets only a rank that ends within
    a sum of gradients, or (sharded) within a pass. Then torchrun sends the others on its node
    SIGTERM, which a wait inside NCCL does not heed, and kills them 30 s later. Where torchrun itself
    is gone (kill -9), each rank does both to itself, so that none keeps a GPU or the run's lock.
    """
    if not launched():
        yield one()
        return
    if "TORCHELASTIC_RUN_ID" in os.environ:  # or started by hand, perhaps from a shell that is left
        end_with(PARENT)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=timedelta(minutes=minutes))
    leaving = None
    try:
        dist.all_reduce(
            torch.zeros(1)
        )  # one that ended now would leave others no one to connect to
        of = Ranks(dist.get_rank(), dist.get_world_size(), device_of_rank())
        try:
            yield of
        except SystemExit as e:
            leaving = e
        of.meet()  # torchrun ends all once one has left with a status: rank 0 may still be writing
    except BaseException as e:
        _end(e)
    dist.destroy_process_group()
    if leaving is not None:
        raise leaving


def start_others(gpus: int, module: str, argv: list[str]) -> None:
    """Run a module in a process for each of several GPUs, where there are as many, and exit with the
    status of those processes.

    Under torchrun, and with one GPU or none, nothing happens.
    """
    count = min(gpus, torch.cuda.device_count())
    if count < 2 or launched():
        return
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    how = LaunchConfig(  # as `torchrun --standalone`
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=str(os.getpid()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    try:
        elastic_launch(how, sys.executable)("-m", module, *argv)
    except ChildFailedError as e:  # has spoken for itself
        _, first = e.get_first_failure()
        status = first.exitcode
        raise SystemExit(status if status > 0 else 128 - status) from None
    except SignalException as e:  # passed on, and waited for
        terminated = e.sigval == signal.SIGTERM
        raise SystemExit(STATUS_INTERRUPTED if terminated else 128 + int(e.sigval)) from None
    raise SystemExit(0)


def end_with(parent: int, poll: float = 1.0) -> None:
    """Have a thread send this process SIGTERM once `parent` is no longer its parent, and SIGKILL
    `GRACE_S` later. It looks every `poll` seconds."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(poll)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="end-with-parent").start()


def _end(error: BaseException) -> NoReturn:
    """Leave with status 2; with a message if no other rank has failed before."""
    mine = f"rank {dist.get_rank()}"
    try:
        store = dist.distributed_c10d._get_default_store()
        speaks = store.compare_set(FAILED, "", mine).decode() == mine
        if not speaks:
            # torchrun ends all as soon as one is gone, the one that is speaking too
            store.wait([SAID], timedelta(seconds=5))
    except dist.DistError:  # the store is gone with rank 0 or torchrun, who are the cause then
        speaks = not _lost(error)
    if speaks:
        if _lost(error):  # killed from outside, say; torchrun names it
            print(
                f"error: another process of this training is gone or does not answer ({error}); run the "
                "same command again to go on from the last checkpoint",
                file=sys.stderr,
            )
        elif said := sentence(error):
            print(f"error: {said}", file=sys.stderr)
        else:
            traceback.print_exception(error)
        sys.stderr.flush()
        with suppress(dist.DistError):
            store.set(SAID, mine)
    sys.stdout.flush()
    os._exit(2)  # without waiting in others' collectives


def _lost(error: BaseException) -> bool:
    """Whether an error only says that another rank is gone, or does not answer."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and "gloo/transport" in str(error)
    )


# --- sharding -----------------------------------------------------------------------------------


def shard(drafter: Drafter, ranks: Ranks) -> Ranks:
    """Keep a part of every weight on each rank (FSDP2), gathered layer by layer when it is used.

    Gradients are summed over ranks, not averaged, as the loss is divided by the mass of the whole
    step already. Raises UserError without torchrun.
    """
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    if not dist.is_initialized():
        raise UserError(
            "machine.train.sharding: found fsdp with one process; allowed: several (gpu 2 or more, or "
            "torchrun), or sharding none"
        )
    for layer in drafter.layers:
        fully_shard(layer)
        register_fsdp_forward_method(layer, "over_pack")
    fully_shard(drafter)
    for module in (drafter, *drafter.layers):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo scales no sums
    return Ranks(ranks.rank, ranks.world, ranks.device, sharded=True)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor that may lie on all ranks in parts. All have to ask for it."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def like(value: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """The part of a whole tensor that `own` is of its own, on the same device."""
    value = value.to(own.device)
    if not hasattr(own, "device_mesh") or value.dim() == 0:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, own.device_mesh, own.placements)
