"""Run a command with exactly N GPUs of this node reserved for it.

Snakemake counts GPUs but names none, so two jobs would both take device 0. This launcher takes a
flock lease per device, names the devices in CUDA_VISIBLE_DEVICES and execs the command.

- In a scheduler's allocation (SLURM, Kubernetes, PBS, LSF, DFLASH_SCHEDULED=1; =0 denies it) that
  shows exactly N devices, these are used as they are, without a lease: they are reserved already,
  and two allocations may both call their own first device 0 and would wait for one another.
- Anywhere else leases are taken among the visible devices (CUDA_VISIBLE_DEVICES, else all
  installed), even if exactly N are visible: an export in somebody's shell reserves nothing.
- The command inherits the locked descriptors, so the kernel ends a lease when the last process that
  has them is gone: kill -9 leaks nothing, a surviving child keeps its device reserved. But Python's
  subprocess closes them in the children it starts (close_fds=True): a lease then lasts as long as
  the direct command (torchrun, say), not as long as its workers.
- Leases bind the jobs that share a lock directory: one user's, on one node. Set DFLASH_LOCK_DIR if
  some sessions lack XDG_RUNTIME_DIR or jobs outlive the login (logging out deletes that directory).
  Never delete it while jobs run, and always name a device in one way: its number and its UUID are
  two locks.
- AMD GPUs are not discovered: set DFLASH_GPUS=K (ROCm obeys CUDA_VISIBLE_DEVICES too).
"""

import argparse
import fcntl
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import NoReturn
from urllib.parse import quote

DEV = Path("/dev")
NVIDIA_PROC = Path("/proc/driver/nvidia/gpus")  # one folder a GPU, named by its PCI address
BATCH_JOB = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")  # set by a scheduler, each names the job
POLL_S = 0.1  # only the one job at the head of the queue polls
REPORT_EVERY_S = 60.0
LEASE_FD = 100  # lease descriptors start here: a shell script's `exec 3>file` must not close one

EXAMPLES = """\
  python -m dflash.launch --gpus 1 -- python -m dflash.extract --help
  python -m dflash.launch --gpus 2 --needs 2 -- torchrun --nproc-per-node=gpu -m dflash.train
  python -m dflash.launch --list
  DFLASH_GPUS=4 python -m dflash.launch --gpus 1 -- env     (tried with 4 stand-in devices)
A card in MIG mode counts as one GPU; to lease its slices separately, name them in CUDA_VISIBLE_DEVICES.
exit status: the command's own; 2 refused, 126 the command cannot be run, 127 no such command"""


def refuse(sentence: str, status: int = 2) -> NoReturn:
    """Say why nothing was started and exit."""
    print(f"dflash: {sentence}", file=sys.stderr)
    raise SystemExit(status)


def stage_name(command: list[str]) -> str:
    """The module after -m (python -m dflash.train), else the command's base name."""
    for flag, module in pairwise(command):
        if flag == "-m" and re.fullmatch(r"[A-Za-z_][\w.]*", module):
            return module
    return os.path.basename(command[0])


def parse_ids(text: str) -> list[str]:
    """Ids in a CUDA_VISIBLE_DEVICES list, ascending; like CUDA, stop at the first that is no id."""
    ids = set()
    for entry in map(str.strip, text.split(",")):
        if not re.fullmatch(r"\d+|(GPU|MIG)-[\w/-]+", entry):
            break
        ids.add(str(int(entry)) if entry.isdecimal() else entry)
    return sorted(ids, key=lambda i: (0, int(i), i) if i.isdecimal() else (1, 0, i))


def installed_devices() -> list[str]:
    """Ids of the devices of this machine, found without CUDA.

    They are numbers in PCI order, as CUDA counts with CUDA_DEVICE_ORDER=PCI_BUS_ID. That is not the
    number in /dev: a container that is given only /dev/nvidia2 calls it device 0.
    """
    if stand_in := os.environ.get("DFLASH_GPUS", "").strip():
        if stand_in.isdecimal():
            return [str(i) for i in range(int(stand_in))]
        return parse_ids(stand_in) or refuse(
            f"DFLASH_GPUS={stand_in!r} is neither a number of devices nor a list such as 0,1."
        )
    infos = "\n".join(path.read_text() for path in NVIDIA_PROC.glob("*/information"))
    minors = re.findall(r"^Device Minor:\s*(\d+)", infos, flags=re.MULTILINE)
    count = sum((DEV / f"nvidia{minor}").exists() for minor in minors)
    if not count and shutil.which("nvidia-smi"):
        try:
            smi = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=10)
        except subprocess.TimeoutExpired:
            refuse("nvidia-smi -L gave no answer in 10 s: mend the driver or set DFLASH_GPUS=K.")
        count = len(re.findall(r"^GPU \d+:", smi.stdout, flags=re.MULTILINE))
    return [str(i) for i in range(count)]


def visible_devices() -> list[str]:
    """The devices that jobs started here may use."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    return installed_devices() if listed is None else parse_ids(listed)


def in_allocation() -> bool:
    """Whether a scheduler has started this job, and so has reserved what it sees."""
    if told := os.environ.get("DFLASH_SCHEDULED"):
        return told == "1"
    return any(map(os.environ.get, (*BATCH_JOB, "SLURM_STEP_ID", "KUBERNETES_SERVICE_HOST")))


def lock_directory(chosen: str | None) -> Path:
    """Make the lock directory; refuse one that is not writable, or that another user has planted.

    The default has a part for each batch job, as two of them on a node may both see devices 0 and 1
    that are not the same.
    """
    chosen = chosen or os.environ.get("DFLASH_LOCK_DIR")
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if chosen:
        folder = Path(chosen).absolute()
    elif runtime and os.access(runtime, os.W_OK):
        folder = Path(runtime, "dflash-gpu")
    else:
        folder = Path(f"/tmp/dflash-gpu-{os.getuid()}")
    remedy = "name a directory of yours on this node's own disk by --lock-dir or DFLASH_LOCK_DIR."
    try:
        folder.mkdir(mode=0o700, parents=bool(chosen), exist_ok=True)
        if not chosen:
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                refuse(f"lock directory {folder} is a link or another user's: {remedy}")
            folder.chmod(0o700)
            if job := next(filter(None, map(os.environ.get, BATCH_JOB)), None):
                folder /= f"job-{quote(job, safe='')}"
                folder.mkdir(mode=0o700, exist_ok=True)
        os.close(os.open(folder / "gate.lock", os.O_RDWR | os.O_CREAT, 0o600))
    except OSError as error:
        refuse(f"lock directory {folder} cannot be written ({error.strerror}): {remedy}")
    return folder


def device_lock(folder: Path, device: str) -> Path:
    return folder / f"gpu-{quote(device, safe='')}.lock"  # an old MIG id has slashes


def lock(path: Path, note: str, wait: bool) -> int | None:
    """Lock a file and note its holder in it, for people only; None if it is held and not `wait`."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    os.ftruncate(fd, 0)
    os.write(fd, f"{os.getpid()} {note}".encode())
    return fd


def holder(path: Path) -> str | None:
    """Who holds a lock, or None if it is free. (The look can make one poll of a waiter fail.)"""
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        pid, _, note = os.read(fd, 4096).decode(errors="replace").partition(" ")
        ended = "" if os.path.exists(f"/proc/{pid}") else ", which ended; a child of it lives on"
        return f"pid {pid} ({note}){ended}"
    finally:
        os.close(fd)


@contextmanager
def reporting(describe: Callable[[], str]) -> Iterator[None]:
    """Print a line every minute; in a thread, as a signal would make flock queue up anew."""
    done = threading.Event()

    def report() -> None:
        while not done.wait(REPORT_EVERY_S):
            print(f"dflash: {describe()}", file=sys.stderr, flush=True)

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def take_leases(folder: Path, devices: list[str], count: int, command: list[str]) -> list[str]:
    """Wait for `count` of the devices, lock them for this process and its children; their ids.

    Whoever has the gate keeps it until enough devices are free at once. So nobody waits while
    holding a device (no deadlock), and a job that wants many is not starved by a stream of small
    ones: they queue behind it, as the kernel hands a flock on nearly first come, first served. The
    price: a small job waits behind a big one even while a device is idle.
    """
    note = shlex.join(command)[:200].replace("\n", " ")

    def other(path: Path) -> str | None:
        who = holder(path)
        return None if who is None or who.startswith(f"pid {os.getpid()} ") else who

    def waiting() -> str:
        busy = {i: who for i in devices if (who := other(device_lock(folder, i)))}
        text = f"{stage_name(command)} waits for {count} of {len(devices)} GPUs; {len(busy)} busy"
        text += "".join(f"; GPU {i}: {who}" for i, who in busy.items())
        first = other(folder / "gate.lock")
        return f"{text}; next in the queue: {first}" if first else text

    with reporting(waiting):
        gate = lock(folder / "gate.lock", note, wait=True)
        leases: dict[str, int] = {}
        while len(leases) < count:
            for device in devices:
                fd = lock(device_lock(folder, device), note, wait=False)
                if fd is not None:
                    leases[device] = fd
                if len(leases) == count:
                    break
            else:  # too few are free: all or nothing
                for fd in leases.values():
                    os.close(fd)
                leases.clear()
                time.sleep(POLL_S)
    for fd in leases.values():
        fcntl.fcntl(fd, fcntl.F_DUPFD, LEASE_FD)  # the same lock on an inheritable descriptor
        os.close(fd)
    os.close(gate)
    return list(leases)


def execute(command: list[str], **variables: str) -> NoReturn:
    """Become the command, with the signal settings it would have had without Python in between."""
    os.environ.update(variables, CUDA_DEVICE_ORDER="PCI_BUS_ID")
    for ignored_by_python in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored_by_python, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        refuse(f"cannot run {command[0]}: {error.strerror}.", status=126)


def launch(gpus: int, needs: int, lock_dir: str | None, command: list[str]) -> NoReturn:
    """Reserve `gpus` devices and become the command, or refuse with a sentence."""
    stage = stage_name(command)
    visible = visible_devices()
    no_gpu = not visible and not installed_devices()
    if gpus < needs and not (gpus == 0 and no_gpu):
        refuse(
            f"{stage} needs gpu={needs} but was given gpu={gpus}; Snakemake lowers a job to the "
            f"run's limit: use --resources gpu={needs} or lower the stage's gpu setting."
        )
    if shutil.which(command[0]) is None:
        refuse(f"no command {command[0]!r}: give an executable's path or one on PATH.", status=127)
    if no_gpu:
        print(f"dflash: no GPU on this machine; {stage} runs on the CPU", file=sys.stderr)
    if no_gpu or gpus == 0:
        execute(command, CUDA_VISIBLE_DEVICES="")
    if in_allocation() and len(visible) == gpus:
        execute(command)
    folder = lock_directory(lock_dir)
    devices = parse_ids(os.environ.get("DFLASH_GPU_LEASE", ""))
    if devices and all(holder(device_lock(folder, i)) for i in devices):  # a lease around us
        if len(devices) != gpus:
            refuse(
                f"{stage} asks for {gpus} GPUs inside a lease of {len(devices)} and would wait for "
                f"itself: ask for {len(devices)} or start it outside the other dflash.launch."
            )
    elif len(visible) < gpus:
        refuse(
            f"{stage} asks for gpu={gpus} but only {len(visible)} can be seen here "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '')!r}): "
            f"use --resources gpu={len(visible)} or make more visible."
        )
    else:
        devices = take_leases(folder, visible, gpus, command)
    ids = ",".join(devices)
    execute(command, CUDA_VISIBLE_DEVICES=ids, DFLASH_GPU_LEASE=ids, DFLASH_LOCK_DIR=str(folder))


def list_devices(lock_dir: str | None) -> None:
    """Print the devices a job could get here and who holds each."""
    folder = lock_directory(lock_dir)
    devices = visible_devices()
    print(f"{len(devices)} GPUs visible here, leases in {folder}")
    for device in devices:
        who = holder(device_lock(folder, device))
        print(f"GPU {device}: {f'held by {who}' if who else 'free'}")


def device_count(text: str) -> int:
    """Argparse type: a whole number, 0 or more."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of devices (0, 1, 2 ...)")
    return int(text)


def main(argv: list[str] | None = None) -> None:
    """Read the command line; what comes after the first -- is the command, untouched."""
    argv = sys.argv[1:] if argv is None else argv
    split = argv.index("--") if "--" in argv else len(argv)
    command = argv[split + 1 :]
    parser = argparse.ArgumentParser(
        prog="python -m dflash.launch",
        usage="%(prog)s --gpus N [--needs M] [--lock-dir DIR] -- COMMAND ARGS... | --list",
        description="Run COMMAND with exactly N GPUs of this node reserved for it.",
        epilog=f"examples:\n{EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--gpus", type=device_count, help="how many GPUs to reserve; 0 hides all")
    parser.add_argument("--needs", type=device_count, help="refuse if N is less (default: N)")
    parser.add_argument("--lock-dir", help="on this node's disk (default: $DFLASH_LOCK_DIR, ...)")
    parser.add_argument("--list", action="store_true", help="show the GPUs and who holds each")
    args = parser.parse_args(argv[:split])
    if args.list:
        return list_devices(args.lock_dir)
    if args.gpus is None:
        parser.error("say how many GPUs to reserve: --gpus N")
    if not command:
        refuse("there is no command to run: write it after --, as in --gpus 1 -- python train.py.")
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while waiting: no traceback
    launch(args.gpus, args.gpus if args.needs is None else args.needs, args.lock_dir, command)


if __name__ == "__main__":
    main()
