"""Several processes: the training of one, and an end to all with the cause said once.

Most tests fork their processes from a server that has imported everything, and give them what
torchrun would: numbers and a store that outlives them. Nothing there ends the others when one ends,
so these have to notice by themselves.
"""

from __future__ import annotations

import errno
import itertools
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import collectives
from support.collectives import Collectives
from test_train import SETTINGS as BASE

from dflash import checkpoint, config, gradient, monitor, ranks, train
from dflash.errors import UserError, entrypoint
from dflash.initial import new_drafter
from dflash.loader import Stream
from dflash.target import read_identity

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["dflash.train", "torch.utils.tensorboard", "transformers"])

SETTINGS = BASE | {
    "num_hidden_layers": 2,
    "training": BASE["training"]
    | {"max_steps": 6, "epochs": 100.0, "validation": {"share": 0.2, "times": 2}},
}
ALL = {"epochs": 100.0, "block_sizes": [2, 4], "ema": 0.9}
LAST = SETTINGS["training"]["max_steps"]


def settings_of(**training: Any) -> config.Drafter:
    data = SETTINGS | {"training": SETTINGS["training"] | training}
    return config.Drafter.model_validate(data)


@pytest.fixture(scope="module")
def features(finished, tmp_path_factory) -> SimpleNamespace:
    """The target's identity and a copy of the feature shards of the tiny workflow."""
    folder = tmp_path_factory.mktemp("features")
    shutil.copytree(finished[0] / "results/features", folder / "features")
    identity = finished[0] / "results/target/identity.json"
    return SimpleNamespace(
        identity=identity, manifests=sorted(map(str, folder.glob("features/*/*.json")))
    )


# --- processes ------------------------------------------------------------------------------------


def together(
    log: Path,
    function: Callable,
    *args: Any,
    when_one_ends: Callable[[], None] = lambda: None,
    world: int = 2,
    seconds: float = 120,
) -> tuple[list[int], str]:
    """Run a function in some processes, as torchrun would. Returns their statuses, and what they
    said on stderr. `when_one_ends` is called when torchrun would end the others."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    started = [
        processes.Process(target=_rank, args=(rank, world, store.port, log, function, args))
        for rank in range(world)
    ]
    for process in started:
        process.start()
    deadline = time.monotonic() + seconds
    if connection.wait([p.sentinel for p in started], seconds):
        when_one_ends()
    for process in started:
        process.join(max(0.0, deadline - time.monotonic()))
    hung = [p for p in started if p.is_alive()]
    for process in hung:
        process.kill()
    said = log.read_text()
    assert not hung, f"{len(hung)} processes hung: {said}"
    return [p.exitcode for p in started], said


def _rank(rank: int, world: int, port: int, log: Path, function: Callable, args: tuple) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), sys.stderr.fileno())
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (until the process ends)
    torch.set_num_threads(1)
    entrypoint(lambda _: function(*args))


class Recorded(train.Trainer):
    """Keeps which documents each step read, and can stop after a step."""

    def __init__(self, *args: Any, stop: int | None = None):
        self.read, self.stop = {}, stop
        super().__init__(*args)

    def _step(self, plan, *args):
        self.read[plan.step] = [p.sample_id for p in plan.places]
        leave, late = super()._step(plan, *args)
        return leave or plan.step + 1 == self.stop, late


def trained(
    features: SimpleNamespace,
    of: ranks.Ranks,
    folder: Path,
    settings: config.Drafter,
    machine: dict[str, Any],
    stop: int | None = None,
) -> None:
    """Train in a folder; its `read-*.json` say which documents each rank read, `done.pt` the end."""
    if of.first:
        folder.mkdir(exist_ok=True)
    of.meet()
    identity = read_identity(features.identity)
    shards, positions = train.open_features(features.manifests, identity, [0, 1, 2])
    how = config.TrainMachine(**{"micro_batch": 2, "keep_last": 9} | machine)
    trainer = Recorded(settings, how, identity, shards, positions, folder, of, stop=stop)
    start = new_drafter(settings, identity).state_dict()
    if how.sharding == "fsdp":
        mine = sum(p.to_local().numel() for p in trainer.drafter.parameters())
        assert mine < 0.6 * trainer.weights
    try:
        drafter, facts = trainer.run()
        if of.first:
            weights = {k: v.clone() for k, v in drafter.state_dict().items()}
            torch.save(
                {"start": start, "weights": weights, "best": facts["best"]}, folder / "done.pt"
            )
    except train.Interrupted:
        pass
    finally:
        path = folder / f"read-{min(trainer.read)}-{of.rank}-{of.world}.json"
        path.write_text(json.dumps(trainer.read))


def read(folder: Path) -> dict[int, list[str]]:
    """The documents of each step, rank by rank."""
    found: dict[int, list[str]] = {}
    for path in sorted(folder.glob("read-*.json")):
        for step, ids in json.loads(path.read_text()).items():
            found.setdefault(int(step), []).extend(ids)
    return found


def lines(folder: Path) -> list[dict[str, Any]]:
    """The logged figures, but for times and memory."""
    timing = {"seconds_per_step", "seconds", "tokens_per_second", "peak_memory_mb"}
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in row.items() if k not in timing} for row in rows]


def assert_same_training(found: Path, expected: Path, tolerance: float) -> None:
    assert read(found) == read(expected) and len(read(found)) == LAST
    for row, other in zip(lines(found), lines(expected), strict=True):
        row, other = (dict(monitor._flat(r)) for r in (row, other))
        assert row == pytest.approx(other, rel=tolerance, abs=tolerance), row["step"]
    a, b = (torch.load(f / "done.pt", weights_only=True) for f in (found, expected))
    assert a["best"] == pytest.approx(b["best"], rel=tolerance)
    apart, way = (
        torch.stack([(x[k] - value).norm() for k, value in b["weights"].items()]).norm()
        for x in (a["weights"], b["start"])
    )
    assert apart <= 10 * tolerance * way, float(apart / way)


# --- the same training ----------------------------------------------------------------------------

CONSTANT = {"pad_context": 240, "pad_blocks": 20}
CASES = {  # settings, how one process does it, how two do, tolerance
    "uneven, mixed, averaged": (dict(ALL), {}, {}, 1e-5),
    "constant shapes": ({}, CONSTANT, CONSTANT, 1e-5),
    "a rank without documents": ({"documents_per_step": 1}, {}, {}, 1e-5),
    "a rank that learns nothing": (
        {"documents_per_step": 2, "loss": {"head_tokens": 2}},
        {"micro_batch": 1},
        {"micro_batch": 1},
        1e-5,
    ),
    "sharded": (dict(ALL), {}, {"sharding": "fsdp"}, 1e-5),
    "sharded, a rank without documents, constant shapes": (
        {"documents_per_step": 1},
        CONSTANT,
        CONSTANT | {"sharding": "fsdp"},
        1e-5,
    ),
    "muon": ({"optimizer": "muon"}, {}, {}, 1e-2),
    "sharded, muon": ({"optimizer": "muon"}, {}, {"sharding": "fsdp"}, 1e-2),
}
ELASTIC = {"none": {}, "fsdp": {"sharding": "fsdp"}}  # of the two processes in the middle


def many(features: SimpleNamespace, folder: Path) -> None:
    train.LOG_EVERY = 1
    with ranks.joined() as of:
        for name, (training, _, machine, _) in CASES.items():
            trained(features, of, folder / name, settings_of(**training), machine)
        for name, machine in ELASTIC.items():
            trained(features, of, folder / name, settings_of(**ALL), machine, stop=4)


@pytest.fixture(scope="module")
def two(features, tmp_path_factory) -> Path:
    """A folder with all trainings by two processes, and the same by one in `alone`."""
    folder = tmp_path_factory.mktemp("two")
    one = ranks.one(torch.device("cpu"))
    (folder / "alone").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "LOG_EVERY", 1)
        for name in ELASTIC:
            trained(features, one, folder / name, settings_of(**ALL), {}, stop=2)
        statuses, said = together(folder / "said", many, features, folder)
        assert statuses == [0, 0], said
        for name in ELASTIC:
            trained(features, one, folder / name, settings_of(**ALL), {})
        for name, (training, machine, _, _) in CASES.items():
            trained(features, one, folder / "alone" / name, settings_of(**training), machine)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_as_one_that_accumulates(two, case):
    assert_same_training(two / case, two / "alone" / case, CASES[case][-1])


@pytest.mark.parametrize("sharding", ELASTIC)
def test_one_process_then_two_then_one_train_as_one(two, sharding):
    steps = [sorted({int(p.name.split("-")[1]) for p in (two / sharding).glob("read-*")})]
    assert steps == [[0, 2, 4]]  # where each began
    assert len(list((two / sharding).glob("read-2-*-2.json"))) == 2
    assert_same_training(two / sharding, two / "alone" / "uneven, mixed, averaged", 1e-5)


def test_the_cases_are_what_they_are_called(features, two):
    read_by = [json.loads((two / "uneven, mixed, averaged" / f"read-0-{r}-2.json").read_text())
               for r in (0, 1)]  # fmt: skip
    assert [len(r["0"]) for r in read_by] == [2, 3]
    identity = read_identity(features.identity)
    shards, positions = train.open_features(features.manifests, identity, [0, 1, 2])
    training = settings_of(documents_per_step=2, loss={"head_tokens": 2})
    one = ranks.one(torch.device("cpu"))
    stream = train.Trainer(
        training, config.TrainMachine(), identity, shards, positions, two / "unused", one
    ).stream
    plans = [
        [stream.plan(step, 2, torch.ones(4), rank, 2) for rank in (0, 1)] for step in range(LAST)
    ]
    teaches = [[sum(p.slots_B.sum() for p in plan.places) > 0 for plan in both] for both in plans]
    assert any(sorted(both) == [False, True] for both in teaches), teaches


def test_sharding_without_torchrun_is_refused(features, tmp_path):
    one = ranks.one(torch.device("cpu"))
    with pytest.raises(UserError, match="found fsdp with one process; .*torchrun"):
        trained(features, one, tmp_path / "r", settings_of(), {"sharding": "fsdp"})


# --- the end --------------------------------------------------------------------------------------


def arguments(features: SimpleNamespace, folder: Path, **machine: Any) -> list[str]:
    """Of dflash.train, for two documents a step."""
    settings = settings_of(documents_per_step=2).model_dump(mode="json", exclude={"extends"})
    machine = {"micro_batch": 1, "save_minutes": 1e-9, "keep_last": 9} | machine
    return [
        *("--settings", json.dumps(settings), "--machine", json.dumps(machine), "--name", "x"),
        *("--identity", str(features.identity), "--features", *features.manifests),
        *("--runs", str(folder / "runs"), "--out", str(folder / "out"), "--threads", "1"),
    ]


def steps_saved(folder: Path) -> list[int]:
    return [int(p.name[5:]) for p in sorted(folder.glob("runs/*/step-*"))]


def failing(argv: list[str], *events: tuple[int, str, int, Callable]) -> None:
    """Train; something happens on a rank, at a place, when it is reached for the n-th time."""
    for rank, where, at, act in events:
        if int(os.environ["RANK"]) == rank:
            owner, name = PLACES[where]
            setattr(owner, name, instead(getattr(owner, name), at, act))
    train.main(argv)


def instead(original: Callable, at: int, act: Callable) -> Callable:
    calls = itertools.count()
    return lambda *args: act(original, *args) if next(calls) == at else original(*args)


PLACES = {  # each reached once a step, with `arguments`
    "read": (Stream, "read"),
    "forward": (gradient, "pack_loss"),
    "gradients": (ranks.Ranks, "sum_gradients"),
    "save": (checkpoint, "save_tensors"),  # twice a step, on rank 0
    "snapshot": (train, "save_tensors"),
}


def kill(original, *args):
    os.kill(os.getpid(), signal.SIGKILL)


def terminate(original, *args):
    os.kill(os.getpid(), signal.SIGTERM)
    return original(*args)


def slow(original, *args):
    time.sleep(0.3)
    return original(*args)


def no_number(original, *args):
    total, correct = original(*args)
    return total * float("nan"), correct


def bug(original, *args):
    raise ZeroDivisionError("a bug")


def full_disk(original, *args):
    raise OSError(errno.ENOSPC, "No space left on device", "/full/disk")


def damage(original, stream, place):
    """Flip a bit of the shard before it is read here."""
    flip(Path(stream._opened(place.shard).path))
    return original(stream, place)


def flip(shard: Path) -> None:
    file = shard / "hidden/c/0/0/0"
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)


def only_line(said: str) -> str:
    """What was said, which has to be one line."""
    told = [x for x in said.splitlines() if "%|" not in x and x.strip()]
    assert len(told) == 1, said
    return told[0]


def test_a_damaged_chunk_that_one_rank_reads(features, tmp_path):
    identity = read_identity(features.identity)
    shards, positions = train.open_features(features.manifests, identity, [0, 1, 2])
    settings = settings_of(documents_per_step=2)
    one = ranks.one(torch.device("cpu"))
    stream = train.Trainer(
        settings, config.TrainMachine(), identity, shards, positions, tmp_path, one
    ).stream
    step, shard = next(
        (s, stream.place(2 * s + 1).shard)
        for s in range(2, LAST)
        if stream.place(2 * s + 1).shard != stream.place(2 * s).shard
    )
    argv = arguments(features, tmp_path, loader_threads=0)
    statuses, said = together(tmp_path / "said", failing, argv, (1, "read", step, damage))
    flip(Path(shards[shard].path))  # mended
    assert statuses == [2, 2]
    assert re.match(f"error: .*{Path(shards[shard].path).name}.*checksum", only_line(said))
    assert steps_saved(tmp_path) == list(range(1, step + 1)) and not (tmp_path / "out").exists()
    train.main(argv)
    assert (tmp_path / "out/training.json").exists()


GONE = "error: another process .* gone"
ENDS = {  # what happens where, statuses, what is said, machine settings
    "killed 1": ((1, "forward", 2, kill), [2, -9], GONE, {}),
    "killed 0": ((0, "gradients", 2, kill), [-9, 2], GONE, {}),
    "killed in a sharded pass": ((1, "forward", 2, kill), [2, -9], GONE, {"sharding": "fsdp"}),
    "full disk": (
        (0, "save", 4, full_disk),
        [2, 2],
        "error: .*cannot be saved: the disk is full.*/full/disk",
        {},
    ),
}


@pytest.mark.parametrize("end", ENDS)
def test_all_end_with_one_line(features, tmp_path, end):
    event, expected, line, machine = ENDS[end]
    argv = arguments(features, tmp_path, **machine)
    statuses, said = together(tmp_path / "said", failing, argv, event)
    assert statuses == expected, said
    assert re.match(line, only_line(said))
    assert steps_saved(tmp_path) == [1, 2] and not (tmp_path / "out").exists()
    if end == "killed 0":
        train.main(arguments(features, tmp_path))
        assert (tmp_path / "out/training.json").exists()


def test_a_loss_that_is_no_number_on_one_rank(features, tmp_path):
    """All leave, but not before rank 0 has written what there is to see."""
    written = []

    def look() -> None:
        written.extend(tmp_path.glob("runs/*/nonfinite-00000002/report.json"))

    events = (1, "forward", 2, no_number), (0, "snapshot", 0, slow)
    statuses, said = together(
        tmp_path / "said", failing, arguments(features, tmp_path), *events, when_one_ends=look
    )
    assert statuses == [2, 2] and len(written) == 1, said
    (sample_id,) = json.loads(written[0].read_text())["sample_ids"]  # the one of rank 1
    line = f"error: step 2: the loss or its gradient is not finite .*samples {sample_id}"
    assert re.match(line, only_line(said))
    assert steps_saved(tmp_path) == [1, 2]


def test_a_bug_on_one_rank_shows_where_once(features, tmp_path):
    argv = arguments(features, tmp_path)
    statuses, said = together(tmp_path / "said", failing, argv, (1, "forward", 2, bug))
    assert statuses == [2, 2]
    assert said.count("Traceback") == said.count("ZeroDivisionError: a bug") == 1, said
    assert said.count("error") <= 1 and "in bug" in said


def test_sigterm_to_one_rank_lets_all_save_the_same_step(features, tmp_path):
    argv = arguments(features, tmp_path, save_minutes=60.0)
    statuses, said = together(tmp_path / "said", failing, argv, (1, "forward", 2, terminate))
    assert statuses == [ranks.STATUS_INTERRUPTED] * 2, said
    assert steps_saved(tmp_path) == [3]


def recorded(argv: list[str], folder: Path, *events: tuple[int, str, int, Callable]) -> None:
    """`failing`, writing down which collectives this rank takes part in."""
    with Collectives(folder / f"collectives-{os.environ['RANK']}"):
        failing(argv, *events)


ORDERS = {  # what happens on rank 1, documents of a step, statuses
    "uneven": (None, 5, [0, 0]),
    "a rank without documents": (None, 1, [0, 0]),
    "sigterm": ((1, "forward", 4, terminate), 5, [ranks.STATUS_INTERRUPTED] * 2),
    "a bug": ((1, "forward", 4, bug), 5, [2, 2]),
}


@pytest.mark.parametrize("sharding", ["none", "fsdp"])
@pytest.mark.parametrize("case", ORDERS)
def test_all_ranks_take_part_in_the_same_collectives(features, tmp_path, case, sharding):
    """In one order, of the same sizes and types, so that none waits for what will not come: uneven ranks,
    ranks without documents, SIGTERM to one. After an error on one the others wait in the next one, at
    most, and are ended from there."""
    event, documents, expected = ORDERS[case]
    argv = arguments(features, tmp_path, sharding=sharding)
    changed = settings_of(documents_per_step=documents).model_dump(mode="json", exclude={"extends"})
    argv[1] = json.dumps(changed)
    events = [event] if event else []
    statuses, said = together(tmp_path / "said", recorded, argv, tmp_path, *events)
    assert statuses == expected, said
    mine, others = (collectives.read(tmp_path / f"collectives-{rank}") for rank in (0, 1))
    assert len(mine) > 20
    kinds = {line.split()[0] for line in mine}
    sharded = {"_allgather_base_", "_reduce_scatter_base_"}
    assert (sharded <= kinds) == (sharding == "fsdp"), kinds
    if case == "a bug":
        assert others == mine[: len(others)] and len(mine) - len(others) == 1
    else:
        assert mine == others


def test_what_all_ranks_refuse_is_said_once(features, tmp_path):
    argv = arguments(features, tmp_path, micro_batch=0)
    statuses, said = together(tmp_path / "said", train.main, argv)
    assert statuses == [2, 2] and "machine.train: `micro_batch`: found 0" in only_line(said)


def test_a_run_directory_in_use_is_said_once(features, tmp_path):
    argv = arguments(features, tmp_path, stop_minutes=1e-9)
    with pytest.raises(SystemExit):
        train.main(argv)
    (run,) = (tmp_path / "runs").iterdir()
    held = checkpoint.lock(run)
    statuses, said = together(tmp_path / "said", train.main, argv)
    held.close()
    assert statuses == [2, 2] and "another trainer is running here" in only_line(said)


def leaving(folder: Path, statuses: list[int | None]) -> None:
    """Leave together: rank 0 after it has written, the others not before."""
    rank = int(os.environ["RANK"])
    try:
        with ranks.joined() as of:
            of.meet()
            if of.first:
                time.sleep(0.3)
                (folder / "written").touch()
            if statuses[rank] is not None:
                raise SystemExit(statuses[rank])
    finally:
        assert (folder / "written").exists()


@pytest.mark.parametrize("status", [0, 75])
def test_no_rank_leaves_while_the_first_writes(tmp_path, status):
    statuses, said = together(tmp_path / "said", leaving, tmp_path, [status or None] * 2)
    assert statuses == [status] * 2, said


def joining(folder: Path) -> None:
    """Rank 1 takes its time to join."""
    original = dist.init_process_group

    def late(*args, **settings) -> None:
        original(*args, **settings)
        time.sleep(0.3)
        (folder / "joined").touch()

    if os.environ["RANK"] == "1":
        dist.init_process_group = late
    with ranks.joined():
        assert (folder / "joined").exists()


def test_no_rank_begins_before_all_have_joined(tmp_path):
    statuses, said = together(tmp_path / "said", joining, tmp_path)
    assert statuses == [0, 0], said


def test_a_wrong_argument_is_said_once(tmp_path):
    statuses, said = together(tmp_path / "said", train.main, ["--settings"])
    assert statuses == [2, 2]
    assert said.count("--settings: expected one argument") == said.count("usage:") == 1


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UserError, match="process 2 of this node.*found 2; start as many"):
        ranks.device_of_rank()


# --- started by ourselves, and by torchrun --------------------------------------------------------


@pytest.fixture
def two_gpus(monkeypatch, tmp_path):
    """As if there were two; and a module `ends` whose rank 1 does what its argument says."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "ends.py").write_text(
        "import os, signal, sys\n"
        "assert os.environ['WORLD_SIZE'] == '2'\n"
        "status = int(sys.argv[1])\n"
        "if os.environ['RANK'] == '1' and status == 137: os.kill(os.getpid(), signal.SIGKILL)\n"
        "sys.exit(status if os.environ['RANK'] == '1' else 0)\n"
    )


@pytest.mark.parametrize("status", [0, 2, 75, 137])
def test_the_status_of_started_processes_is_passed_on(two_gpus, status):
    with pytest.raises(SystemExit) as end:
        ranks.start_others(8, "ends", [str(status)])
    assert end.value.code == status


@pytest.mark.parametrize("gpus", [0, 1])
def test_one_gpu_starts_no_others(two_gpus, gpus):
    assert ranks.start_others(gpus, "ends", ["75"]) is None  # otherwise it would exit


ENVIRONMENT = os.environ | {
    "PYTHONPATH": str(Path(__file__).parent.parent),
    "OMP_NUM_THREADS": "1",
}
PIPES = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def launcher(argv: list[str]) -> subprocess.Popen:
    """The stage as if on two devices (which the processes that it starts do not see)."""
    code = "import torch; torch.cuda.device_count = lambda: 2; from dflash import train\n"
    code += "from dflash.errors import entrypoint; entrypoint(train.main)"
    return subprocess.Popen([sys.executable, "-c", code, *argv], env=ENVIRONMENT, **PIPES)


def begun(argv: list[str], folder: Path) -> subprocess.Popen:
    """A long training, once it has logged a step."""
    at = argv.index("--settings") + 1
    long = settings_of(documents_per_step=2, max_steps=400, validation={"share": 0.0})
    argv[at] = long.model_dump_json(exclude={"extends"})
    process = launcher(argv)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if any(p.stat().st_size for p in folder.glob("runs/*/metrics.jsonl")):
            break
        time.sleep(0.05)
    return process


def test_started_processes_save_on_sigterm_and_torchrun_goes_on(features, tmp_path):
    """The whole way: `gpu: 2`, then torchrun."""
    argv = arguments(features, tmp_path, gpu=2, save_minutes=60.0)
    process = begun(argv, tmp_path)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == ranks.STATUS_INTERRUPTED, said
    assert said.count("interrupted; saved in") == 1 and "2 processes" in said
    (step,) = steps_saved(tmp_path)
    assert 10 <= step < 400
    argv[argv.index("--machine") + 1] = '{"stop_minutes": 1e-9}'
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *torchrun, "-m", "dflash.train", *argv],
        env=ENVIRONMENT,
        timeout=240,
        **PIPES,
    )
    assert done.returncode == 1 and steps_saved(tmp_path) == [step, step + 1], done.stdout
    assert f"going on from step {step}" in done.stdout
    assert done.stdout.count("interrupted; saved in") == 1


def test_started_processes_save_and_end_when_their_parent_is_killed(features, tmp_path):
    process = begun(arguments(features, tmp_path, gpu=2, save_minutes=60.0), tmp_path)
    process.kill()
    said, _ = process.communicate(timeout=120)  # until the last of them has closed the pipe
    assert process.returncode == -signal.SIGKILL
    assert said.count("interrupted; saved in") == 1, said
    (step,) = steps_saved(tmp_path)
    assert 10 <= step < 400


def test_started_processes_end_when_their_parent_is_killed_before_they_join(features, tmp_path):
    """They are still loading torch then, and would wait for its store for half an hour."""
    process = launcher(arguments(features, tmp_path, gpu=2))
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and len(children.read_text().split()) < 2:
        time.sleep(0.01)
    time.sleep(0.5)  # for Python to begin
    process.kill()
    process.communicate(timeout=60)  # until the last of them has closed the pipe
    assert not steps_saved(tmp_path)


# --- two trainings in one process -----------------------------------------------------------------


def test_two_threads_train_what_one_after_the_other_does(features, tmp_path):
    one = ranks.one(torch.device("cpu"))
    cases = {"a": settings_of(), "b": settings_of(optimizer="muon", seed=1)}
    for name, settings in cases.items():
        trained(features, one, tmp_path / name, settings, {})
    errors = []

    def work(name: str) -> None:
        try:
            trained(features, one, tmp_path / f"{name}-thread", cases[name], {})
        except BaseException as e:
            errors.append(e)
            raise

    threads = [threading.Thread(target=work, args=(name,)) for name in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for name in cases:
        a, b = (
            torch.load(tmp_path / f / "done.pt", weights_only=True)["weights"]
            for f in (name, f"{name}-thread")
        )
        assert all(torch.equal(a[key], b[key]) for key in a)
