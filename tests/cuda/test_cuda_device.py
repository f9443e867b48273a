"""The emulated device refuses what CUDA refuses, and notices what goes wrong out of sight."""

from __future__ import annotations

import pytest
import torch
from support.cuda import device

OTHER = "Expected all tensors to be on the same device"


def test_results_are_the_hosts(gpu):
    x = torch.randn(5, 6, requires_grad=True)
    y = x.detach().to(gpu).requires_grad_()
    for t in (x, y):
        ((t @ t.T).softmax(-1)[1:].cumsum(0) * 2).square().sum().backward()
    assert y.grad.device == gpu
    torch.testing.assert_close(y.grad.cpu(), x.grad)


@pytest.mark.parametrize(
    "run",
    [
        lambda a, b: a + b,
        lambda a, b: a @ b,
        lambda a, b: torch.cat([a, b]),
        lambda a, b: torch.where(a > 0, a, b),
        lambda a, b: a.index_select(0, torch.tensor([0])),
        lambda a, b: torch.nn.functional.embedding(torch.tensor([0]), a),
        lambda a, b: a.gather(0, torch.zeros(1, 1, dtype=torch.int64)),
        lambda a, b: b[torch.zeros(1, dtype=torch.int64, device=a.device)],
        lambda a, b: a.add_(b),
        lambda a, b: torch.mm(a, a, out=torch.empty(3, 3)),
        lambda a, b: a.index_copy_(0, torch.tensor([0]), a[:1].clone()),
        lambda a, b: a.to("cuda:1") + a,
    ],
)
def test_devices_are_not_mixed(gpu, run):
    a, b = torch.ones(3, 3, device=gpu), torch.ones(3, 3)
    with pytest.raises(
        RuntimeError, match=f"{OTHER}|expected to be in the same device|on the same device as"
    ):
        run(a, b)


def test_numbers_may_come_from_the_host(gpu):
    a = torch.ones(3, device=gpu)
    assert (a * torch.tensor(2.0) + 1).tolist() == [3.0] * 3
    assert a.masked_fill(a > 0, torch.tensor(5.0)).tolist() == [5.0] * 3
    with pytest.raises(RuntimeError, match=OTHER):
        torch.ones(3) + torch.ones(1, device=gpu)


def test_new_memory_holds_no_zeros(gpu):
    assert torch.empty(4, device=gpu).isnan().all()
    assert torch.empty(4, pin_memory=True).isnan().all()


def test_what_makes_the_host_wait(gpu):
    a = torch.arange(6.0, device=gpu)
    pinned, plain = torch.ones(6).pin_memory(), torch.ones(6)
    free = [
        lambda: a * 2,
        lambda: a.copy_(pinned, non_blocking=True),
        lambda: pinned.to(gpu, non_blocking=True),
        lambda: a.to("cpu", non_blocking=True),
        lambda: a.index_select(0, torch.arange(2, device=gpu)),
        lambda: a.masked_fill(a > 2, 0.0),
        lambda: torch.full((3,), 2, device=gpu),
        lambda: a[2:4].zero_(),
    ]
    for run in free:
        with device.waits() as waits:
            run()
        assert waits == []
    waiting = [
        lambda: a.sum().item(),
        lambda: a[0] > 0 and None,
        lambda: a.to("cpu"),
        lambda: plain.to(gpu),
        lambda: plain.to(gpu, non_blocking=True),  # not pinned
        lambda: pinned.double().to(gpu, non_blocking=True),
        lambda: a.copy_(pinned.double(), non_blocking=True),  # converted on the way
        lambda: a[::2].copy_(pinned[::2], non_blocking=True),
        lambda: torch.tensor([1.0, 2.0], device=gpu),
        lambda: a[a > 2],
        lambda: (a > 2).nonzero(),
        lambda: torch.equal(a, a),
        lambda: a[torch.tensor([1])],  # a CPU index is copied
        lambda: torch.cuda.synchronize(),
    ]
    for number, run in enumerate(waiting):
        with device.waits() as waits:
            run()
        assert len(waits) >= 1, number


def test_a_copy_to_the_host_arrives_when_it_is_waited_for(gpu):
    a = torch.arange(4.0, device=gpu)
    host = a.to("cpu", non_blocking=True)
    assert host.is_pinned() and host.isnan().all()
    event = torch.cuda.current_stream().record_event()
    assert not event.query()
    event.synchronize()
    assert host.tolist() == [0, 1, 2, 3]


def test_pinned_memory_that_changes_before_its_copy_ended(gpu):
    pinned = torch.ones(8).pin_memory()
    moved = pinned.to(gpu, non_blocking=True)
    pinned.fill_(2.0)
    torch.cuda.synchronize()
    (found,) = device.faults()
    assert "pinned memory was changed" in found and moved.sum().item() == 8
    moved = pinned.to(gpu, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    pinned.fill_(3.0)  # by now it may
    del pinned, moved


def test_streams_that_do_not_wait_for_each_other(gpu):
    side = torch.cuda.Stream(gpu)
    a = torch.ones(4, device=gpu)
    with torch.cuda.stream(side), pytest.raises(RuntimeError, match="without waiting for it"):
        a * 2
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        b = a * 2
    with pytest.raises(RuntimeError, match="without waiting for it"):
        b + 1
    with pytest.raises(RuntimeError, match="writes what is read on"):
        a.zero_()
    assert len(device.faults()) == 3
    torch.cuda.current_stream().wait_stream(side)
    a.zero_()
    assert (b + 1).tolist() == [3] * 4
    a.record_stream(side)


def test_memory_given_out_again_while_another_stream_may_use_it(gpu):
    side = torch.cuda.Stream(gpu)
    for recorded in (False, True):
        a = torch.ones(4, device=gpu)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            b = a * 2
        if recorded:
            a.record_stream(side)
        del a
        torch.empty(4, device=gpu)  # might get the same memory
        found = device.faults()
        assert [("record_stream" in x) for x in found] == ([] if recorded else [True])
    torch.cuda.current_stream().wait_stream(side)
    b.sum().item()


def test_memory_has_an_end_and_is_counted(gpu):
    before = torch.cuda.memory_allocated()
    a = torch.empty(1 << 10, device=gpu)
    assert torch.cuda.memory_allocated() - before == 4 << 10
    with (
        device.limit(1 << 10),
        pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"),
    ):
        a * 2
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated()
    b = a * 2
    del a, b
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() == before + (8 << 10)


def test_autocast(gpu):
    a = torch.randn(3, 3, device=gpu)
    with torch.autocast("cuda", torch.bfloat16):
        assert (a @ a).dtype == torch.bfloat16
        assert (a @ a).softmax(-1).dtype == torch.float32


def test_times_need_events_that_have_happened(gpu):
    ends = [torch.cuda.Event(enable_timing=True) for _ in "ab"]
    for end in ends:
        end.record()
        torch.ones(3, device=gpu) * 2
    with pytest.raises(RuntimeError, match="must be completed"):
        ends[0].elapsed_time(ends[1])
    torch.cuda.synchronize()
    assert ends[0].elapsed_time(ends[1]) >= 0
