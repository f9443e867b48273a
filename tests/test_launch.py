"""dflash.launch, on stand-in devices (DFLASH_GPUS) and with lock directories of its own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dflash import launch

ROOT = Path(launch.__file__).parents[1]
LAUNCH = [sys.executable, "-m", "dflash.launch"]
FOREIGN = ("CUDA_", "DFLASH_", "SLURM_", "PBS_", "LSB_", "KUBERNETES_", "XDG_RUNTIME")
SHOW = ["sh", "-c", 'echo "$CUDA_VISIBLE_DEVICES/$DFLASH_GPU_LEASE/$CUDA_DEVICE_ORDER"']


def wait_until(true: Callable[[], object], what: str, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"{what}: not within {seconds} s"
        time.sleep(0.02)


class Node:
    """A machine with four stand-in GPUs and a lock directory; its jobs are killed at the end."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.locks = folder / "locks"
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}
        self.env |= {
            "DFLASH_GPUS": "4",
            "DFLASH_LOCK_DIR": str(self.locks),
            "PYTHONPATH": str(ROOT),
        }
        self.jobs: list[subprocess.Popen[str]] = []

    def start(self, *args: object, prefix: list[str] = LAUNCH, **env: str) -> subprocess.Popen[str]:
        job = subprocess.Popen(
            [*prefix, *map(str, args)],
            env=self.env | env,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # a background run of the tests ignores Ctrl-C, and its children would inherit that
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        self.jobs.append(job)
        return job

    def run(self, *args: object, prefix: list[str] = LAUNCH, **env: str) -> tuple[int, str, str]:
        job = self.start(*args, prefix=prefix, **env)
        out, err = job.communicate(timeout=30)
        return job.returncode, out.strip(), err.strip()

    def hold(self, gpus: int, name: str, **env: str) -> subprocess.Popen[str]:
        """A job that makes the file `name`, keeps its devices until `name`.stop exists and ends."""
        script = 'echo "$CUDA_VISIBLE_DEVICES" > $0; while ! [ -e $0.stop ]; do sleep 0.05; done'
        return self.start("--gpus", gpus, "--", "sh", "-c", script, name, **env)

    def began(self, name: str) -> bool:
        return (self.folder / name).exists() and (self.folder / name).read_text() != ""

    def devices(self, name: str) -> str:
        wait_until(lambda: self.began(name), f"start of {name}")
        return (self.folder / name).read_text().strip()

    def stop(self, name: str) -> None:
        (self.folder / f"{name}.stop").touch()

    def next_in_queue(self) -> str:
        return launch.holder(self.locks / "gate.lock") or ""

    def wait_in_queue(self, job: subprocess.Popen[str]) -> None:
        """Until the job is the one that waits for devices."""
        wait_until(lambda: f"pid {job.pid} " in self.next_in_queue(), "job at the gate")

    def close(self) -> None:
        for job in self.jobs:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)  # each leads a session of its own
            job.communicate()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    def hang(*_: object) -> None:
        raise TimeoutError("the test did not end within 90 s")

    node = Node(tmp_path)
    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(90)
    yield node
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    node.close()


# ---- twenty jobs, some killed -------------------------------------------------------------------

# Binds an abstract socket per device for as long as it lives: the kernel frees it however it dies,
# and independently of the leases. A clash counts if the name stays taken for 0.1 s: the kernel may
# end a killed job's lease some microseconds before its socket.
JOB = r"""
import os, socket, sys, time
log, hold, namespace = sys.argv[1], float(sys.argv[2]), sys.argv[3]
ids = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
def write(word):
    with open(log, "a") as file:
        file.write(f"{word} {time.monotonic()} {','.join(ids)}\n")
marks = [socket.socket(socket.AF_UNIX) for _ in ids]
for id, mark in zip(ids, marks):
    for attempt in range(11):
        try:
            mark.bind(f"\0{namespace}/{id}")
            break
        except OSError:
            time.sleep(0.01)
    else:
        write("clash")
        sys.exit(1)
write("start")
time.sleep(hold)
write("end")
for mark in marks:
    mark.close()
"""


OUTCOMES = ("clashes", "finished", "killed_waiting", "killed_holding", "failed")


def run_twenty(node: Node, leased: bool) -> dict[str, int]:
    """Run 20 jobs, kill 3 that wait and 5 that hold devices; count what came of them."""
    logs: dict[subprocess.Popen[str], Path] = {}

    def start(gpus: int, hold: float) -> subprocess.Popen[str]:
        log = node.folder / f"job{len(logs)}"
        job = [sys.executable, "-IS", "-c", JOB, log, hold, node.folder]
        if leased:
            started = node.start("--gpus", gpus, "--", *job)
        else:
            started = node.start(*job, prefix=[], CUDA_VISIBLE_DEVICES="0")
        logs[started] = log
        return started

    def began(job: subprocess.Popen[str]) -> bool:
        return job.poll() is not None or (logs[job].exists() and logs[job].stat().st_size > 0)

    holders = [start(gpus, hold=60) for gpus in (1, 1, 2)]
    wait_until(lambda: all(map(began, holders)), "all four devices held")
    crowd = [start(gpus, hold=0.3) for gpus in (1, 2, 1, 1, 2, 1, 1, 1, 2, 1, 1, 2, 1, 1, 2)]
    late_holders = [start(gpus, hold=60) for gpus in (1, 2)]
    if leased:
        wait_until(node.next_in_queue, "somebody at the gate")
        first = node.next_in_queue()
        crowd.sort(key=lambda job: f"pid {job.pid} " not in first)  # it is killed, and two more
        for job in crowd[:3]:
            job.kill()
    for job in holders:
        job.kill()
    for job in late_holders:
        wait_until(lambda job=job: began(job), "a late holder's turn")
        job.kill()
    for job in crowd:
        job.wait(timeout=40)

    counts = dict.fromkeys(OUTCOMES, 0)
    changes = []  # (time, +1 or -1) of the jobs that ran to their end
    for job, log in logs.items():
        lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
        words = [line[0] for line in lines]
        counts["clashes"] += "clash" in words
        if job.wait() == -signal.SIGKILL:
            counts["killed_holding" if words else "killed_waiting"] += 1
        elif words == ["start", "end"] and job.returncode == 0:
            counts["finished"] += 1
            changes += [(float(lines[0][1]), 1), (float(lines[1][1]), -1)]
        else:
            counts["failed"] += 1
    running = [sum(step for _, step in sorted(changes)[: i + 1]) for i in range(len(changes))]
    return counts | {"most_at_once": max(running, default=0)}


def test_twenty_jobs_never_share_a_device_and_kills_leak_nothing(node: Node) -> None:
    counts = run_twenty(node, leased=True)
    most_at_once = counts.pop("most_at_once")
    assert counts == dict(zip(OUTCOMES, (0, 12, 3, 5, 0), strict=True))
    assert 1 < most_at_once <= 4
    assert node.run("--gpus", 4, "--", *SHOW) == (0, "0,1,2,3/0,1,2,3/PCI_BUS_ID", "")


def test_the_detector_fires_without_leases(node: Node) -> None:
    counts = run_twenty(node, leased=False)
    assert counts["clashes"] > 0


# ---- waiting ------------------------------------------------------------------------------------


def test_all_or_nothing(node: Node) -> None:
    node.hold(3, "first")
    assert node.devices("first") == "0,1,2"
    assert node.run("--gpus", 1, "--", *SHOW)[1] == "3/3/PCI_BUS_ID", "one runs beside the first"
    second = node.hold(3, "second")
    node.wait_in_queue(second)
    wait_until(lambda: not launch.holder(node.locks / "gpu-3.lock"), "nothing held while waiting")
    time.sleep(0.3)
    assert not node.began("second")
    node.stop("first")
    assert node.devices("second") == "0,1,2"


def test_a_stream_of_small_jobs_does_not_starve_a_big_one(node: Node) -> None:
    loop = 'while :; do "$@" --gpus 1 -- sh -c "echo >> begun; exec sleep 0.5"; done'
    stream = [node.start(prefix=["sh", "-c", loop, "loop", *LAUNCH]) for _ in range(8)]
    locks = [node.locks / f"gpu-{i}.lock" for i in range(4)]
    wait_until(lambda: all(map(launch.holder, locks)), "all devices busy")
    for name in ("big1", "big2", "big3"):
        before = (node.folder / "begun").read_text().count("\n")
        node.hold(4, name)
        assert node.devices(name) == "0,1,2,3"
        overtook = (node.folder / "begun").read_text().count("\n") - before
        assert overtook <= 20, "8 may be ahead in the queue, others come while the big one starts"
        node.stop(name)
    assert all(loop.poll() is None for loop in stream), "the stream flowed until then"


def test_waiting_is_reported_with_the_holders(node: Node) -> None:
    holder = node.hold(3, "busy")
    node.devices("busy")
    code = "import sys; from dflash import launch; launch.REPORT_EVERY_S = 0.2; launch.main()"
    impatient = [sys.executable, "-c", code]
    first = node.start("--gpus", 2, "--", "true", prefix=impatient)
    node.wait_in_queue(first)
    behind = node.start("--gpus", 1, "--", "python", "-m", "dflash.train", prefix=impatient)
    assert first.stderr and behind.stderr
    line = next(line for line in first.stderr if "3 busy" in line)
    assert line.startswith(
        f"dflash: true waits for 2 of 4 GPUs; 3 busy; GPU 0: pid {holder.pid} (sh"
    )
    line = next(line for line in behind.stderr if "next in the queue" in line)
    assert "dflash.train waits for 1 of 4 GPUs" in line
    assert line.endswith(f"next in the queue: pid {first.pid} (true)\n")
    node.stop("busy")
    assert first.wait(timeout=30) == 0


def test_ctrl_c_while_waiting_ends_without_a_traceback(node: Node) -> None:
    node.hold(4, "busy")
    node.devices("busy")
    waiter = node.start("--gpus", 1, "--", "true")
    node.wait_in_queue(waiter)
    waiter.send_signal(signal.SIGINT)
    assert waiter.communicate(timeout=30) == ("", "")
    assert waiter.returncode == -signal.SIGINT


# ---- how long a lease lasts ---------------------------------------------------------------------


def test_a_surviving_child_keeps_the_device(node: Node) -> None:
    script = "sleep 60 >/dev/null 2>&1 & echo $!"
    status, child, _ = node.run("--gpus", 1, "--", "sh", "-c", script, DFLASH_GPUS="1")
    assert status == 0
    _, listing, _ = node.run("--list", DFLASH_GPUS="1")
    assert "GPU 0: held by pid" in listing and "which ended; a child of it lives on" in listing
    waiter = node.hold(1, "waiter", DFLASH_GPUS="1")
    node.wait_in_queue(waiter)
    time.sleep(0.3)
    assert not node.began("waiter")
    os.kill(int(child), signal.SIGKILL)
    assert node.devices("waiter") == "0"


def test_a_child_of_python_subprocess_does_not_keep_it(node: Node) -> None:
    code = "import subprocess; print(subprocess.Popen(['sleep', '60'], stdout=-3, stderr=-3).pid)"
    _, child, _ = node.run("--gpus", 1, "--", sys.executable, "-c", code)
    assert node.run("--list")[1].splitlines()[1] == "GPU 0: free", "documented: close_fds=True"
    os.kill(int(child), signal.SIGKILL)


def test_a_script_that_reuses_low_descriptors_keeps_its_lease(node: Node) -> None:
    script = "exec 3>/dev/null 4>&3 5>&3 6>&3 7>&3 8>&3 9>&3; touch began; sleep 60"
    node.start("--gpus", 1, "--", "sh", "-c", script)
    wait_until(lambda: (node.folder / "began").exists(), "start")
    assert "GPU 0: held by pid" in node.run("--list")[1]


def test_the_command_gets_its_status_output_and_signals(node: Node) -> None:
    assert node.run("--gpus", 1, "--", "sh", "-c", "echo a; exit 7")[:2] == (7, "a")
    ignored = node.run("--gpus", 1, "--", "grep", "SigIgn", "/proc/self/status")[1]
    assert int(ignored.split()[1], 16) & (1 << (signal.SIGPIPE - 1)) == 0


def test_a_call_inside_a_lease_uses_it(node: Node) -> None:
    inner = [*LAUNCH, "--gpus", 2, "--", *SHOW]
    assert node.run("--gpus", 2, "--", *inner) == (0, "0,1/0,1/PCI_BUS_ID", "")
    inner = [*LAUNCH, "--gpus", 1, "--", *SHOW]
    status, _, error = node.run("--gpus", 2, "--", *inner)
    assert status == 2 and "asks for 1 GPUs inside a lease of 2" in error


def test_an_old_lease_in_the_environment_is_not_trusted(node: Node) -> None:
    node.hold(1, "other")
    node.devices("other")
    assert node.run("--gpus", 1, "--", *SHOW, DFLASH_GPU_LEASE="3")[1] == "1/1/PCI_BUS_ID"


# ---- how many devices, and which ----------------------------------------------------------------


def test_fewer_than_needed_is_refused(node: Node) -> None:
    status, out, error = node.run("--gpus", 1, "--needs", 2, "--", "python", "-m", "dflash.train")
    assert (status, out) == (2, "")
    assert error.startswith("dflash: dflash.train needs gpu=2 but was given gpu=1;")
    assert "--resources gpu=2" in error and "lower the stage's gpu setting" in error
    assert node.run("--gpus", 0, "--needs", 1, "--", "true")[0] == 2, "0 of 1, with GPUs installed"
    assert node.run("--gpus", 1, "--needs", 2, "--", "true", DFLASH_GPUS="0")[0] == 2
    assert node.run("--gpus", 2, "--needs", 1, "--", *SHOW)[1] == "0,1/0,1/PCI_BUS_ID"


@pytest.mark.parametrize("gpus", [0, 1, 8])
def test_without_any_gpu_it_runs_on_the_cpu(node: Node, gpus: int) -> None:
    needs = ["--needs", 1] if gpus == 0 else []
    code = "import os; print(repr(os.environ['CUDA_VISIBLE_DEVICES']))"
    job = ["--gpus", gpus, *needs, "--", sys.executable, "-c", code]
    line = f"dflash: no GPU on this machine; {Path(sys.executable).name} runs on the CPU"
    assert node.run(*job, DFLASH_GPUS="0") == (0, "''", line)
    assert not node.locks.exists()


def test_zero_gpus_hides_them(node: Node) -> None:
    assert node.run("--gpus", 0, "--", *SHOW) == (0, "//PCI_BUS_ID", "")


@pytest.mark.parametrize(
    "scheduler",
    ["SLURM_JOB_ID", "SLURM_STEP_ID", "KUBERNETES_SERVICE_HOST", "PBS_JOBID", "LSB_JOBID"],
)
def test_what_a_scheduler_allots_is_used_as_it_is(node: Node, scheduler: str) -> None:
    node.hold(4, "busy")  # leases mean nothing here: this would otherwise wait
    node.devices("busy")
    allotted = {"CUDA_VISIBLE_DEVICES": "3,1", scheduler: "7"}
    assert node.run("--gpus", 2, "--", *SHOW, **allotted) == (0, "3,1//PCI_BUS_ID", "")


def test_the_scheduler_can_be_declared_and_denied(node: Node) -> None:
    two = {"CUDA_VISIBLE_DEVICES": "3,1"}
    command = ["--gpus", 2, "--", *SHOW]
    assert node.run(*command, **two, DFLASH_SCHEDULED="1")[1] == "3,1//PCI_BUS_ID"
    denied = two | {"SLURM_JOB_ID": "7", "DFLASH_SCHEDULED": "0"}
    assert node.run(*command, **denied)[1] == "1,3/1,3/PCI_BUS_ID"


def test_a_pod_without_the_variable_sees_what_is_installed(node: Node) -> None:
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "DFLASH_GPUS": "2"}
    assert node.run("--gpus", 2, "--", *SHOW, **pod) == (0, "//PCI_BUS_ID", "")
    assert node.run("--gpus", 1, "--", *SHOW, **pod) == (0, "0/0/PCI_BUS_ID", "")


def test_a_whole_node_allocation_is_leased_out(node: Node) -> None:
    node.hold(1, "other")
    assert node.devices("other") == "0"
    whole = {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLURM_JOB_ID": "7"}
    assert node.run("--gpus", 2, "--", *SHOW, **whole)[1] == "1,2/1,2/PCI_BUS_ID"


def test_an_export_in_the_shell_is_leased_even_if_the_count_fits(node: Node) -> None:
    shell = {"CUDA_VISIBLE_DEVICES": "2,3"}
    node.hold(1, "other", **shell)
    assert node.devices("other") == "2"
    waiter = node.hold(2, "both", **shell)
    node.wait_in_queue(waiter)
    time.sleep(0.3)
    assert not node.began("both")
    node.stop("other")
    assert node.devices("both") == "2,3"


@pytest.mark.parametrize(
    ("visible", "gpus", "leased"),
    [
        ("GPU-b2,GPU-a1", 1, "GPU-a1"),
        ("MIG-GPU-c/1/0,MIG-GPU-c/2/0", 2, "MIG-GPU-c/1/0,MIG-GPU-c/2/0"),
        ("10,9, 2", 3, "2,9,10"),
        ("1,1,2", 2, "1,2"),
    ],
)
def test_ids_are_those_of_the_variable_ascending(
    node: Node, visible: str, gpus: int, leased: str
) -> None:
    shown = node.run("--gpus", gpus, "--", *SHOW, CUDA_VISIBLE_DEVICES=visible)
    assert shown == (0, f"{leased}/{leased}/PCI_BUS_ID", "")
    assert all(path.parent == node.locks for path in node.locks.rglob("*.lock"))


@pytest.mark.parametrize(("visible", "count"), [("0", 1), ("", 0), ("-1", 0), ("1,-1,2", 1)])
def test_fewer_visible_than_asked_is_refused(node: Node, visible: str, count: int) -> None:
    status, out, error = node.run("--gpus", 2, "--", *SHOW, CUDA_VISIBLE_DEVICES=visible)
    assert (status, out) == (2, "")
    assert f"sh asks for gpu=2 but only {count} can be seen here" in error
    assert f"--resources gpu={count}" in error


# ---- discovery ----------------------------------------------------------------------------------


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty machine: no devices, no driver, nothing on PATH."""
    monkeypatch.setattr(launch, "DEV", tmp_path / "dev")
    monkeypatch.setattr(launch, "NVIDIA_PROC", tmp_path / "proc")
    monkeypatch.delenv("DFLASH_GPUS", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for folder in ("dev", "bin"):
        (tmp_path / folder).mkdir()
    return tmp_path


def smi(machine: Path, script: str) -> None:
    (machine / "bin/nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (machine / "bin/nvidia-smi").chmod(0o755)


def test_discovery_counts_the_driver_gpus_that_have_a_device_node(machine: Path) -> None:
    for address, minor in (("0000:41:00.0", 2), ("0000:01:00.0", 3), ("0000:81:00.0", 4)):
        (machine / "proc" / address).mkdir(parents=True)
        information = f"Model: \t\t NVIDIA H200\nDevice Minor: \t {minor}\nGPU Excluded:\t No\n"
        (machine / "proc" / address / "information").write_text(information)
    for node in ("nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (machine / "dev" / node).touch()
    assert launch.installed_devices() == ["0", "1"], "CUDA's numbers, not those of the nodes"


def test_discovery_by_nvidia_smi(machine: Path) -> None:
    assert launch.installed_devices() == []
    smi(machine, "echo 'GPU 0: NVIDIA A (UUID: GPU-1)\n  MIG 1g\nGPU 1: NVIDIA A (UUID: GPU-2)'")
    assert launch.installed_devices() == ["0", "1"]
    smi(machine, "echo 'No devices were found'; exit 6")
    assert launch.installed_devices() == []


def test_a_driver_that_hangs_is_refused(
    machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def hang(*_: object, timeout: float, **__: object) -> None:
        raise subprocess.TimeoutExpired("nvidia-smi", timeout)

    smi(machine, "")
    monkeypatch.setattr(subprocess, "run", hang)
    with pytest.raises(SystemExit, match="2"):
        launch.installed_devices()
    assert "gave no answer in 10 s" in capsys.readouterr().err


def test_stand_in_devices(node: Node) -> None:
    assert node.run("--gpus", 1, "--", *SHOW, DFLASH_GPUS="5,7")[1] == "5/5/PCI_BUS_ID"
    status, _, error = node.run("--gpus", 1, "--", *SHOW, DFLASH_GPUS="two")
    assert status == 2 and "DFLASH_GPUS='two' is neither" in error


# ---- the lock directory -------------------------------------------------------------------------


def test_default_lock_directory(node: Node) -> None:
    runtime = {"XDG_RUNTIME_DIR": str(node.folder), "DFLASH_LOCK_DIR": ""}
    assert node.run("--gpus", 1, "--", "true", **runtime)[0] == 0
    assert (node.folder / "dflash-gpu/gpu-0.lock").exists()
    assert (node.folder / "dflash-gpu").stat().st_mode & 0o777 == 0o700
    listing = node.run("--list", **runtime | {"XDG_RUNTIME_DIR": str(node.folder / "missing")})[1]
    assert f"leases in /tmp/dflash-gpu-{os.getuid()}" in listing
    assert node.run("--gpus", 1, "--lock-dir", "a/b", "--", "true", **runtime)[0] == 0
    assert (node.folder / "a/b/gpu-0.lock").exists()


def test_batch_jobs_of_one_node_do_not_wait_for_one_another(node: Node) -> None:
    """Both see devices 0 and 1, which are not the same: the scheduler numbers each job's own."""
    batch = {"XDG_RUNTIME_DIR": str(node.folder), "DFLASH_LOCK_DIR": "", "DFLASH_GPUS": "2"}
    node.hold(1, "one", **batch, SLURM_JOB_ID="1")
    assert node.devices("one") == "0"
    shown = node.run("--gpus", 1, "--", *SHOW, **batch, SLURM_JOB_ID="2")
    assert shown[1] == "0/0/PCI_BUS_ID"
    shown = node.run("--gpus", 1, "--", *SHOW, **batch, SLURM_JOB_ID="1")
    assert shown[1] == "1/1/PCI_BUS_ID"


@pytest.mark.parametrize("planted", ["link", "file", "foreign"])
def test_a_planted_default_directory_is_refused(node: Node, planted: str) -> None:
    folder = node.folder / "dflash-gpu"
    if planted == "link":
        (node.folder / "elsewhere").mkdir()
        folder.symlink_to("elsewhere")
    elif planted == "file":
        folder.touch()
    elif os.getuid() == 0:
        folder.mkdir()
        os.chown(folder, 12345, -1)
    else:
        pytest.skip("only root can give a directory away")
    env = {"XDG_RUNTIME_DIR": str(node.folder), "DFLASH_LOCK_DIR": ""}
    status, out, error = node.run("--gpus", 1, "--", *SHOW, **env)
    assert (status, out) == (2, "")
    assert f"lock directory {folder} " in error and "--lock-dir or DFLASH_LOCK_DIR" in error


def test_a_lock_directory_that_cannot_be_written_is_refused(node: Node) -> None:
    closed = node.folder / "closed"
    closed.mkdir(mode=0o500)
    for folder in ("/proc/dflash", *([] if os.getuid() == 0 else [closed])):  # root writes anywhere
        status, out, error = node.run("--gpus", 1, "--lock-dir", folder, "--", *SHOW)
        assert (status, out) == (2, "")
        assert error.startswith(f"dflash: lock directory {folder} cannot be written (")
        assert error.endswith("by --lock-dir or DFLASH_LOCK_DIR.") and "\n" not in error


# ---- the command line ---------------------------------------------------------------------------


def test_list_shows_every_device_and_its_holder(node: Node) -> None:
    holder = node.hold(2, "busy")
    node.devices("busy")
    head, *lines = node.run("--list")[1].splitlines()
    assert head == f"4 GPUs visible here, leases in {node.locks}"
    assert [line.split(" (")[0] for line in lines] == [
        f"GPU 0: held by pid {holder.pid}",
        f"GPU 1: held by pid {holder.pid}",
        "GPU 2: free",
        "GPU 3: free",
    ]


def test_help_has_examples(node: Node) -> None:
    status, out, _ = node.run("--help")
    assert status == 0 and "python -m dflash.launch --gpus 1 -- " in out
    assert len(out.splitlines()) < 25


@pytest.mark.parametrize("command", ["no-such-command", "./no/such/path", ""])
def test_an_unknown_command_is_127(node: Node, command: str) -> None:
    status, _, error = node.run("--gpus", 1, "--", command)
    assert status == 127
    assert error == f"dflash: no command {command!r}: give an executable's path or one on PATH."


def test_a_command_that_cannot_be_run_is_126_and_frees_its_device(node: Node) -> None:
    (node.folder / "text").write_text("no program")
    (node.folder / "text").chmod(0o755)
    status, _, error = node.run("--gpus", 4, "--", "./text")
    assert status == 126 and error == "dflash: cannot run ./text: Exec format error."
    assert "held" not in node.run("--list")[1]


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--gpus", "1", "--"], "dflash: there is no command to run"),
        (["--gpus", "1"], "dflash: there is no command to run"),
        (["--gpus", "-1", "--", "true"], "'-1' is not a number of devices"),
        (["--gpus", "1.5", "--", "true"], "'1.5' is not a number of devices"),
        (["--gpus", "all", "--", "true"], "'all' is not a number of devices"),
        (["--needs", "1", "--", "true"], "say how many GPUs to reserve"),
        (["true"], "unrecognized arguments: true"),
    ],
)
def test_wrong_calls(node: Node, args: list[str], sentence: str) -> None:
    status, out, error = node.run(*args)
    assert (status, out) == (2, "") and sentence in error


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["python", "-m", "dflash.train", "--x"], "dflash.train"),
        (["torchrun", "--nproc-per-node=gpu", "-m", "dflash.train"], "dflash.train"),
        (["/usr/bin/env", "-m"], "env"),
        (["git", "commit", "-m", "a message"], "git"),
    ],
)
def test_stage_name(command: list[str], name: str) -> None:
    assert launch.stage_name(command) == name
