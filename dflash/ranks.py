"""The processes of one training: one, or as many as torchrun has started.

Each rank reads its own documents of a step and adds their gradients; one sum over all ranks before
the optimiser makes them the step's. No wrapper counts backward passes, so a rank without any block
takes part with zeros and holds up nobody, and every rank holds the same weights bit for bit. With
`shard` (FSDP2) a rank keeps a part of each weight instead; then all have to run as many passes.

NCCL on GPUs, gloo on CPUs. What is said, and what is written, is rank 0's.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from dflash.drafter import Drafter
from dflash.errors import UserError

T = TypeVar("T")
FAILURE = "dflash/failure"  # in torchrun's store: who failed first


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
        with _another():
            dist.all_reduce(total)
        return total.tolist()

    def sum_gradients(self, drafter: nn.Module) -> None:
        """Make every rank's gradients those of all. FSDP2 has done so in the backward pass."""
        if self.world == 1 or self.sharded:
            return
        waiting = []
        with _another():
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
        with _another():
            dist.all_gather_object(lists, mine)
        return [item for part in lists for item in part]

    def told(self, data: T) -> T:
        """What rank 0 has."""
        if self.world == 1:
            return data
        found = [data]
        with _another():
            dist.broadcast_object_list(found, src=0)
        return found[0]


def device_of_rank() -> torch.device:
    """The GPU with this process's number on its node, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device("cuda", torch.cuda.current_device())


def one(device: torch.device | None = None) -> Ranks:
    """This process alone."""
    return Ranks(0, 1, device or device_of_rank())


@contextmanager
def joined(minutes: float = 30.0) -> Iterator[Ranks]:
    """This process among those that torchrun started, or alone.

    An error in one of them ends all with its message, which is printed once: by the rank that was
    first to fail. `minutes` is how long the others wait for a rank that neither answers nor ends.
    """
    if "RANK" not in os.environ:
        yield one()
        return
    device = device_of_rank()
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timedelta(minutes=minutes))
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), device)
    except SystemExit:  # agreed upon
        raise
    except BaseException as e:
        _end(e)
    finally:
        with suppress(RuntimeError):  # others may be gone
            dist.destroy_process_group()


def start_others(gpus: int, module: str, argv: list[str]) -> None:
    """Run a module in a process for each of several GPUs, where there are as many, and exit with the
    status of those processes.

    Under torchrun, and with one GPU or none, nothing happens.
    """
    count = min(gpus, torch.cuda.device_count())
    if count < 2 or "RANK" in os.environ:
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
        raise SystemExit(128 + int(e.sigval)) from None
    raise SystemExit(0)


class _Another(Exception):
    """Some other rank is gone; what happened is its to say."""


@contextmanager
def _another() -> Iterator[None]:
    try:
        yield
    except RuntimeError as e:  # gloo's and NCCL's, of a lost connection or a timeout
        raise _Another(str(e)) from e


def _end(error: BaseException) -> NoReturn:
    """Leave with status 2, with a message if no other rank has failed before."""
    mine = f"rank {dist.get_rank()}"
    who = mine
    with suppress(RuntimeError):  # the store may be gone, with rank 0 or torchrun
        store = dist.distributed_c10d._get_default_store()
        if not isinstance(error, _Another):
            who = store.compare_set(FAILURE, "", mine).decode()
        elif store.check([FAILURE]):
            who = store.get(FAILURE).decode()
    if who == mine and isinstance(error, _Another):
        # Killed from outside, say; torchrun names it. One line of ours, from one of those left.
        if dist.get_rank() == 0:
            print(f"error: another process of this training ended ({error})", file=sys.stderr)
    elif who == mine and isinstance(error, UserError | OSError):
        print(f"error: {error}", file=sys.stderr)
    elif who == mine:
        traceback.print_exception(error)
    sys.stderr.flush()
    os._exit(2)  # without waiting in others' collectives


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
