"""Documents with their hidden states from vLLM, which runs in a child process (`dflash.vllm_worker`).

    with reading(target, settings, machine, rows, out) as documents:
        for document in documents: ...

The stage sends token ids; a connector inside vLLM (`dflash.vllm_connector`) puts the states of each
finished document into a spool, from which they are taken in the order of the rows, whatever order vLLM
finished them in. At most `machine.vllm.spool_mb` of states are ever asked for and not yet taken, so that
bounds the spool and what vLLM has waiting.

Legend: S tokens · L layers asked of vLLM · T taps · H hidden width.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dflash import spool
from dflash.config import Extract, ExtractMachine
from dflash.errors import UserError, explain_oserror
from dflash.features import Document
from dflash.files import scratch

if TYPE_CHECKING:
    from dflash.regenerate import TokenRow
    from dflash.target import Identity

POLL_S = 0.005
STOP_S = 30.0  # for vLLM to end once its input did
LOG_LINES = 20
MAX_SEQUENCES = 256  # vLLM's own default, which may not exceed the tokens of a step


def layers_of(taps: Sequence[int], last_hidden: bool, num_layers: int) -> list[int]:
    """Decoder layers to ask of vLLM: the taps, then the last layer where that is wanted.

    vLLM hands layers over in rising order and ignores ids it does not have, so UserError is raised for
    any other order and for such ids.
    """
    if list(taps) != sorted(set(taps)) or not 0 <= taps[0] <= taps[-1] < num_layers:
        raise UserError(
            f"taps {list(taps)}: expected rising layer ids from 0 to {num_layers - 1}, as the target has "
            f"{num_layers} layers and vLLM hands them over in that order; change the drafter's `taps`"
        )
    return sorted({*taps, num_layers - 1}) if last_hidden else list(taps)


def engine_of(
    target: Identity, settings: Extract, machine: ExtractMachine, longest: int
) -> dict[str, Any]:
    """What vLLM is told beyond that it is to extract (arguments of its EngineArgs)."""
    return {
        "model": target.folder,
        "dtype": settings.dtype,
        "trust_remote_code": settings.trust_remote_code,
        # One for the token it samples; with less it silently keeps no states of the longest documents.
        "max_model_len": longest + 1,
        "max_num_batched_tokens": machine.batch_tokens,
        "max_num_seqs": min(MAX_SEQUENCES, machine.batch_tokens),
        "tensor_parallel_size": machine.vllm.tensor_parallel,
        "pipeline_parallel_size": machine.vllm.pipeline_parallel,
        "gpu_memory_utilization": machine.vllm.gpu_memory_utilization,
    }


class Child:
    """A process of its own session that is fed lines, and its log. Made by `child`."""

    def __init__(self, process: subprocess.Popen, log: Path):
        self.process = process
        self.log = log

    def send(self, line: dict[str, Any]) -> None:
        try:
            self.process.stdin.write(json.dumps(line) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it is dying: whoever waits for its answer says so

    def wait_for(self, path: Path, what: str) -> None:
        """Return when the file is there. Raises UserError when the child ends before."""
        while not path.exists():
            if self.process.poll() is not None and not path.exists():
                raise UserError(self._obituary(what))
            time.sleep(POLL_S)

    def _obituary(self, what: str) -> str:
        """Show the end of the log; returns how the child ended, with the last error that it names."""
        status = self.process.returncode
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        text = self.log.read_text(errors="replace")
        print("\n".join(text.splitlines()[-LOG_LINES:]), file=sys.stderr, flush=True)
        error = (re.findall(r"\b\w*(?:Error|Exception): .*", text) or ["it named no error"])[-1]
        return (
            f"vLLM {how} before it {what} ({error}); mend what the end of its log above says (docs/vllm.md) "
            "or set `extract.backend: transformers`"
        )


@contextmanager
def child(python: str, folder: Path, threads: int) -> Iterator[Child]:
    """Run `dflash.vllm_worker` with another interpreter, in `folder`; gone when the block ends.

    Raises UserError when that interpreter cannot be started.
    """
    # A link to this package alone: its folder may be a site-packages full of other versions.
    (folder / "path").mkdir()
    (folder / "path" / "dflash").symlink_to(Path(__file__).parent.resolve())
    environment = os.environ | {
        "PYTHONPATH": str(folder / "path"),
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # so that OMP_NUM_THREADS counts
    with open(folder / "log", "wb") as log:
        try:
            process = subprocess.Popen(
                [os.path.abspath(shutil.which(python) or python), "-m", "dflash.vllm_worker"],
                cwd=folder / "path",
                env=environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
                start_new_session=True,
                close_fds=False,  # a GPU lease (dflash.launch) lasts as long as vLLM
            )
        except OSError as e:
            raise UserError(
                f"machine.extract.vllm.python: {python} cannot be started ({explain_oserror(e)}); give the "
                "interpreter of an environment that holds vLLM (docs/vllm.md)"
            ) from None
    try:
        yield Child(process, folder / "log")
    finally:
        try:
            process.stdin.close()  # asks it to end
            process.wait(STOP_S)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            pass
        try:
            os.killpg(process.pid, signal.SIGKILL)  # also what it started and left behind
        except ProcessLookupError:
            pass
        process.wait()


@contextmanager
def reading(
    target: Identity,
    settings: Extract,
    machine: ExtractMachine,
    rows: Sequence[TokenRow],
    out: Path,
    threads: int,
) -> Iterator[Iterator[Document]]:
    """Start vLLM with the target; yields every row with its hidden states, in order.

    `settings` are those of the stage, with `taps`, `dtype` and so on; the spool lies beside `out` unless
    `machine` names a folder. Raises UserError when vLLM cannot be started, ends early or hands over
    something else than was asked for.
    """
    with states(target, settings, machine, rows, out, threads) as handed:
        yield documents(rows, handed, len(settings.taps), settings.last_hidden)


@contextmanager
def states(
    target: Identity,
    settings: Extract,
    machine: ExtractMachine,
    rows: Sequence[TokenRow],
    out: Path,
    threads: int,
) -> Iterator[Iterator[Tensor]]:
    """Likewise; yields the states [S, L, H] of every row as they were computed."""
    layers = layers_of(settings.taps, settings.last_hidden, target.num_hidden_layers)
    longest = max(len(row.input_ids) for row in rows)
    beside = Path(machine.vllm.spool) if machine.vllm.spool else out.parent
    python = machine.vllm.python or sys.executable
    with (
        scratch(beside / f"{out.name}.spool") as folder,
        child(python, folder, threads) as vllm,
    ):
        print(f"extract: vLLM loads the target; its log is {folder}/log", flush=True)
        engine = engine_of(target, settings, machine, longest)
        vllm.send({"engine": engine, "layers": layers, "spool": str(folder)})
        vllm.wait_for(folder / "ready", "had loaded the target")
        row_bytes = len(layers) * target.hidden_size * getattr(torch, settings.dtype).itemsize
        window = machine.vllm.spool_mb * 1_000_000 // row_bytes
        yield taken(vllm, rows, folder, window, len(layers), target.hidden_size)


def taken(
    vllm: Child, rows: Sequence[TokenRow], folder: Path, window: int, layers: int, hidden: int
) -> Iterator[Tensor]:
    """The states [S, L, H] of every row in order; at most `window` tokens (or one row) are under way.

    Raises UserError when vLLM ends early or hands over another document's states.
    """
    sent = underway = 0
    for i, row in enumerate(rows):
        while sent < len(rows) and (sent == i or underway + len(rows[sent].input_ids) <= window):
            ids = rows[sent].input_ids
            vllm.send({"index": sent, "sample_id": rows[sent].sample_id, "ids": ids.tolist()})
            underway += len(ids)
            sent += 1
        path = spool.place(folder, i)
        vllm.wait_for(path, f"handed over sample {row.sample_id}, number {i + 1} of {len(rows)}")
        try:
            states_SLH = spool.take(path, row.sample_id, row.input_ids, layers, hidden)
        except ValueError as e:
            raise UserError(
                f"sample {row.sample_id}: vLLM handed over {e}; use the vLLM that docs/vllm.md names, or set "
                "`extract.backend: transformers`"
            ) from None
        path.unlink()
        underway -= len(row.input_ids)
        yield states_SLH


def documents(
    rows: Sequence[TokenRow], states: Iterator[Tensor], taps: int, last_hidden: bool
) -> Iterator[Document]:
    """Rows with their states rounded to bf16 (to nearest even), the last layer apart."""
    for row, states_SLH in zip(rows, states, strict=True):
        bits_SLH = states_SLH.to(torch.bfloat16).view(torch.uint16).numpy()
        last = bits_SLH[:, -1] if last_hidden else None
        yield Document(row.sample_id, row.input_ids, row.loss_mask, bits_SLH[:, :taps], last)
