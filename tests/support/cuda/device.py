"""An emulated CUDA device: torch's CPU build, with tensors that say `cuda` and compute on the host.

`device.cpp` beside this says what it refuses; `kernels.py` has the attention kernels, `nccl.py` the
collectives. It has to be loaded before torch, so a process gets it from `site/sitecustomize.py`: start
it with the environment that `environment()` gives.

    from support.cuda import device
    subprocess.run([sys.executable, ...], env=device.environment())

Inside, `waits()` tells where the host has waited for the device, `faults()` what went wrong out of
sight, `limit()` makes memory scarce.

Not shown by it: what a kernel computes, how long anything takes, the real allocator's cache, graphs.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parent
SWITCH = "DFLASH_EMULATED_CUDA"  # in the environment: the compiled device
NAME = "Emulated H100"
MEMORY = 80 << 30


# --- from outside ---------------------------------------------------------------------------------


def build() -> Path:
    """Compile the device for this torch, once. Raises CalledProcessError with the compiler's words."""
    torch = Path(importlib.util.find_spec("torch").origin).parent
    sources = [HERE / name for name in ("device.cpp", "nccl.cpp")]
    known = b"".join(p.read_bytes() for p in (*sources, HERE / "device.h", torch / "version.py"))
    name = f"emulated-cuda-{hashlib.sha256(known).hexdigest()[:16]}.so"
    for folder in (Path(sys.prefix), Path(tempfile.gettempdir())):
        path = folder / name
        if path.exists():
            return path
        if os.access(folder, os.W_OK):
            break
    partial = path.with_suffix(f".{os.getpid()}")
    headers, libraries = torch / "include", torch / "lib"
    command = ["g++", *"-std=c++20 -O1 -w -shared -fPIC -DUSE_C10D_GLOO".split()]
    command += [f"-I{headers}", f"-I{headers}/torch/csrc/api/include"]
    command += [*map(str, sources), "-o", str(partial)]
    command += [f"-L{libraries}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{libraries}"]
    subprocess.run(command, check=True)
    partial.rename(path)
    return path


def environment(**more: str) -> dict[str, str]:
    """That of a process whose torch has the emulated device."""
    paths = [str(HERE / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {SWITCH: str(build()), "PYTHONPATH": os.pathsep.join(paths)}
    return os.environ | own | more


# --- inside ---------------------------------------------------------------------------------------

_library: Any = None
_kept: list[Any] = []  # callbacks and registrations
_waits: list[str] | None = None
_where: list[str] = []


def load() -> None:
    """Put the device into this process. Before torch is imported."""
    global _library
    if "torch" in sys.modules:
        raise RuntimeError("the emulated device has to be loaded before torch")
    folder = Path(importlib.util.find_spec("torch").origin).parent / "lib"
    for pattern in ("libgomp*.so*", "libc10.so", "libtorch_cpu.so"):
        for path in sorted(folder.glob(pattern)):
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    _library = ctypes.CDLL(os.environ[SWITCH])
    for name in ("emulated_allocated", "emulated_peak", "emulated_copies"):
        getattr(_library, name).restype = ctypes.c_int64
    _library.emulated_set_limit.argtypes = [ctypes.c_int, ctypes.c_int64]
    _library.emulated_fault.restype = ctypes.c_char_p
    callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(_on_wait)
    _library.emulated_on_wait(callback)
    _kept.append(callback)
    atexit.register(_last_faults)


def _last_faults() -> None:
    """End a program, a stage say, with an error if something went wrong out of sight."""
    left = faults()
    for text in left:
        print(f"emulated device: {text}", file=sys.stderr, flush=True)
    if left:
        os._exit(3)


def active() -> bool:
    """Whether this process has the device."""
    return _library is not None


def _on_wait(why: bytes) -> None:
    if _waits is not None:
        stack = traceback.extract_stack()
        ours = [f for f in stack if f"{os.sep}dflash{os.sep}" in f.filename]
        known = ours[-1:] or stack[-2:-1]  # none in autograd's own threads
        at = "".join(f" at {Path(f.filename).name}:{f.name}" for f in known)
        _waits.append(f"{why.decode()}{at}")


@contextmanager
def waits() -> Iterator[list[str]]:
    """What makes the host wait for the device meanwhile: the operator, the file and function."""
    global _waits
    before, _waits = _waits, []
    try:
        yield _waits
    finally:
        _waits = before


def faults() -> list[str]:
    """What went wrong out of sight since the last call."""
    found = []
    while text := _library.emulated_fault():
        found.append(text.decode())
    return found


@contextmanager
def collectives() -> Iterator[list[str]]:
    """What goes over NCCL meanwhile: name, numbers and type of each collective of the device."""
    found: list[str] = []
    callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(lambda text: found.append(text.decode()))
    _kept.append(callback)
    _library.emulated_on_collective(callback)
    try:
        yield found
    finally:
        _library.emulated_on_collective(None)


@contextmanager
def limit(bytes_more: int, index: int = 0) -> Iterator[None]:
    """Let a device give only so many bytes more."""
    _library.emulated_set_limit(index, _library.emulated_allocated(index) + bytes_more)
    try:
        yield
    finally:
        _library.emulated_set_limit(index, -1)


@contextmanager
def without_races() -> Iterator[None]:
    """Do not look for streams that fail to wait for each other."""
    _library.emulated_set_races(0)
    try:
        yield
    finally:
        _library.emulated_set_races(1)


def set_devices(count: int) -> None:
    _library.emulated_set_devices(count)


def patch(torch: Any) -> None:
    """Give `torch.cuda` what it asks of a CUDA build, and the device its attention kernels."""
    from support.cuda import kernels

    _kept.append(kernels.register())
    cuda = torch.cuda
    number = lambda device=None: (  # noqa: E731
        cuda.current_device()
        if device is None
        else device
        if isinstance(device, int)
        else cuda.current_device()
        if torch.device(device).index is None
        else torch.device(device).index
    )

    class Stream(torch.Stream):
        """As torch.cuda.Stream."""

        def __new__(cls, device=None, priority=0, **kwargs):
            if "stream_id" in kwargs:
                return super().__new__(cls, **kwargs)
            return super().__new__(cls, torch.device("cuda", number(device)), priority=priority)

        def wait_event(self, event) -> None:
            event.wait(self)

        def wait_stream(self, stream) -> None:
            self.wait_event(stream.record_event())

        def record_event(self, event=None):
            event = event or Event()
            event.record(self)
            return event

        @property
        def cuda_stream(self) -> int:
            return self.stream_id

    class Event:
        """As torch.cuda.Event."""

        def __init__(self, enable_timing=False, blocking=False, interprocess=False, external=False):
            self.event = torch.Event("cuda", enable_timing=enable_timing)

        def record(self, stream=None) -> None:
            self.event.record(stream or cuda.current_stream())

        def wait(self, stream=None) -> None:
            self.event.wait(stream or cuda.current_stream())

        def query(self) -> bool:
            return self.event.query()

        def synchronize(self) -> None:
            self.event.synchronize()

        def elapsed_time(self, end) -> float:
            return self.event.elapsed_time(end.event)

    def of(stream: Any) -> Any:
        return Stream(
            stream_id=stream.stream_id,
            device_index=stream.device_index,
            device_type=stream.device_type,
        )

    class StreamContext:
        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            if self.stream is not None:
                self.before = cuda.current_stream(self.stream.device)
                self.device = cuda.current_device()
                cuda.set_stream(self.stream)

        def __exit__(self, *_):
            if self.stream is not None:
                cuda.set_stream(self.before)
                cuda.set_device(self.device)

    class Device:
        def __init__(self, device):
            self.index = number(device)

        def __enter__(self):
            self.before = cuda.current_device()
            cuda.set_device(self.index)

        def __exit__(self, *_):
            cuda.set_device(self.before)

    def set_device(device) -> None:
        index = number(device)
        if not 0 <= index < cuda.device_count():
            raise RuntimeError("CUDA error: invalid device ordinal")
        _library.emulated_set_device(index)

    def set_stream(stream) -> None:
        torch._C._accelerator_setStream(stream)

    def synchronize(device=None) -> None:
        torch._C._accelerator_synchronizeDevice(number(device))

    properties = SimpleNamespace(
        name=NAME,
        major=9,
        minor=0,
        total_memory=MEMORY,
        multi_processor_count=132,
        shared_memory_per_block_optin=232448,
        gcnArchName="",
        is_integrated=False,
    )
    torch._C._cuda_getCurrentRawStream = lambda index: cuda.current_stream(index).stream_id
    torch.version.cuda = "13.0"
    # a function of its own for each: torch._dynamo keeps rules by function
    cuda._lazy_init = lambda: None
    cuda.init = lambda: None
    cuda._lazy_call = lambda call, **kwargs: call()
    cuda.is_initialized = lambda: True
    cuda._is_compiled = lambda: True
    cuda.is_available = lambda: True
    torch.backends.cuda.is_built = lambda: True
    cuda.device_count = lambda: _library.emulated_devices()
    cuda.current_device = lambda: _library.emulated_current_device()
    cuda.set_device = set_device
    cuda.device = Device
    cuda.get_device_properties = lambda device=None: properties
    cuda.get_device_name = lambda device=None: NAME
    cuda.get_device_capability = lambda device=None: (9, 0)
    cuda.is_bf16_supported = lambda including_emulation=True: True
    cuda.Stream, cuda.Event = Stream, Event
    cuda.streams.Stream, cuda.streams.Event = Stream, Event
    cuda.StreamContext = StreamContext
    cuda.stream = lambda stream: StreamContext(stream)
    cuda.set_stream = set_stream
    cuda.current_stream = lambda device=None: of(torch._C._accelerator_getStream(number(device)))
    cuda.default_stream = lambda device=None: Stream(
        stream_id=0, device_index=number(device), device_type=1
    )
    cuda.synchronize = synchronize
    cuda.memory_allocated = lambda device=None: _library.emulated_allocated(number(device))
    cuda.max_memory_allocated = lambda device=None: _library.emulated_peak(number(device))
    cuda.memory_reserved = lambda device=None: cuda.memory_allocated(device)
    cuda.max_memory_reserved = lambda device=None: cuda.max_memory_allocated(device)
    cuda.reset_peak_memory_stats = lambda device=None: _library.emulated_reset_peak(number(device))
    cuda.mem_get_info = lambda device=None: (MEMORY - cuda.memory_allocated(device), MEMORY)
    for name in (
        "empty_cache",
        "ipc_collect",
        "manual_seed",
        "manual_seed_all",
        "seed",
        "seed_all",
    ):
        setattr(cuda, name, lambda *_: None)
    cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = lambda state, device=None: None
    cuda._get_device = lambda device: torch.device("cuda", number(device))
    resize = torch.UntypedStorage.resize_

    def resize_(storage, size):
        if storage.device.type != "cuda":
            return resize(storage, size)
        view = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        torch.ops.emulated.resize_storage(view, size)
        return storage

    torch.UntypedStorage.resize_ = resize_
    distributed = torch.distributed
    begin = distributed.init_process_group

    def init_process_group(backend=None, *args, **kwargs):
        """`cpu:gloo,cuda:nccl`: what goes over NCCL is gloo's, between the same memory."""
        begin("cpu:gloo", *args, **kwargs)
        if "nccl" in str(backend):
            world, known = distributed.group.WORLD, distributed.distributed_c10d._world.pg_map
            _library.emulated_nccl(world.group_name.encode())
            known[world] = (backend, known[world][1])

    distributed.init_process_group = init_process_group
    distributed.is_nccl_available = lambda: True
    real = torch.profiler.profile

    def profile(*args, activities=None, **kwargs):
        """The host's operators: what would record the device is not there."""
        known = [a for a in activities or () if a != torch.profiler.ProfilerActivity.CUDA]
        return real(*args, activities=known or None, **kwargs)

    torch.profiler.profile = profile
    for module in (cuda.memory, cuda.random):
        for name in dir(module):
            if name in vars(cuda):
                setattr(module, name, getattr(cuda, name))
