"""Extraction through vLLM: what crosses between the processes, and what becomes of it when one fails.

vLLM itself is not needed: its half of the connector meets stand-ins for vLLM's modules, and the stage
meets a stub in place of vLLM's interpreter, which writes the spool's files in plain Python. The last
test runs the real one where DFLASH_VLLM_PYTHON names its interpreter.
"""

from __future__ import annotations

import io
import json
import os
import queue
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from support.targets import SHAPE, save_tiny
from support.vllm import CACHE, LAYERS, Connector, connector_module
from test_extract import SETTINGS, TAPS, alone, as_float, some_rows
from transformers import Qwen3Config, Qwen3ForCausalLM

from dflash import config, extract, extract_vllm, spool, vllm_worker
from dflash.errors import UserError
from dflash.features import open_shard
from dflash.files import scratch
from dflash.regenerate import TokenRow, write_tokens
from dflash.target import load_model

ID = "0123456789abcdef"
HIDDEN = 64  # of the tiny targets


# --- the spool ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_spool_file_gives_back_what_was_put(tmp_path, dtype):
    states = torch.randn(5, 2, 8).to(dtype)
    path = spool.place(tmp_path, 7)
    spool.put(path, ID, range(5), states.transpose(0, 1).contiguous().transpose(0, 1))
    assert [p.name for p in tmp_path.iterdir()] == ["00000007.states"]
    found = spool.take(path, ID, np.arange(5, dtype=np.int32), 2, 8)
    assert found.dtype == dtype and torch.equal(found, states)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (("f" * 16, [1, 2, 3], 2, 8), f"sample_id {ID}, expected ffff"),
        ((ID, [1, 2, 4], 2, 8), "ids_sha256 .*, expected"),
        ((ID, [1, 2, 3], 1, 8), r"shape \[3, 2, 8\], expected \[3, 1, 8\]"),
        ((ID, [1, 2, 3], 2, 9), r"shape \[3, 2, 8\], expected \[3, 2, 9\]"),
    ],
)
def test_a_spool_file_of_another_document_is_refused(tmp_path, asked, words):
    spool.put(tmp_path / "a.states", ID, [1, 2, 3], torch.zeros(3, 2, 8))
    with pytest.raises(ValueError, match=words):
        spool.take(tmp_path / "a.states", *asked)


def test_a_spool_file_of_the_wrong_size_is_refused(tmp_path):
    path = tmp_path / "a.states"
    spool.put(path, ID, [1, 2, 3], torch.zeros(3, 2, 8))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"191 bytes, expected \[3, 2, 8\] of float32"):
        spool.take(path, ID, [1, 2, 3], 2, 8)


def test_scratch_is_gone_afterwards_and_so_are_leftovers(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (tmp_path / f".a.spool.{dead.pid}.partial").mkdir()
    with pytest.raises(KeyError), scratch(tmp_path / "a.spool") as folder:
        assert list(tmp_path.iterdir()) == [folder]
        (folder / "x").touch()
        raise KeyError
    assert list(tmp_path.iterdir()) == []


# --- the connector, with stand-ins for vLLM -----------------------------------------------------


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    with connector_module(monkeypatch) as found:
        yield found


@pytest.fixture
def connector(module: ModuleType, tmp_path: Path) -> Connector:
    made = Connector(module, tmp_path, [["model.layers.0.attn"], [CACHE]])
    made.worker.register_kv_caches({"model.layers.0.attn": torch.zeros(1), CACHE: made.cache})
    return made


def test_chunks_of_several_prompts_come_out_whole(connector):
    """Two prompts grow by turns, in chunks that end inside blocks, in blocks out of order."""
    one, two = torch.randn(10, LAYERS, 8), torch.randn(7, LAYERS, 8)
    for states, blocks, start, end in [
        (one, [5, 2, 9], 0, 3),
        (two, [3, 11], 0, 5),
        (one, [5, 2, 9], 3, 9),
        (two, [3, 11], 5, 7),
        (one, [5, 2, 9], 9, 10),
    ]:
        connector.fill(CACHE, blocks, start, states[start:end])
    assert connector.finish(1, list(range(7)), ([0], [3, 11])) == (True, {"r1-x"})
    assert connector.finish(0, list(range(10)), ([0], [5, 2, 9])) == (True, {"r0-x"})
    for index, states in enumerate([one, two]):
        path = spool.place(connector.folder, index)
        found = spool.take(path, f"{index:016x}", list(range(len(states))), LAYERS, 8)
        assert torch.equal(found, states)
    nothing = SimpleNamespace(total_num_scheduled_tokens=0)
    assert connector.scheduler.build_connector_meta(nothing).finished == []


def test_slots_that_no_step_filled_are_noticed(connector):
    """Also those that an earlier request filled: its states must not pass for another's."""
    connector.fill(CACHE, [5, 2], 0, torch.randn(8, LAYERS, 8))
    connector.finish(0, list(range(8)), ([], [5, 2]))
    connector.fill(CACHE, [5, 2], 0, torch.randn(6, LAYERS, 8))
    with pytest.raises(RuntimeError, match="sample 0{15}1: vLLM kept the states of 6 of 8 tokens"):
        connector.finish(1, list(range(8)), ([], [5, 2]))
    connector.fill("model.layers.0.attn", [11], 0, torch.randn(4, LAYERS, 8))  # another layer's
    with pytest.raises(RuntimeError, match="of 0 of 4 tokens"):
        connector.finish(2, [1, 2, 3, 4], ([], [11]))


def test_only_the_first_tensor_rank_of_the_last_stage_writes(module, tmp_path, monkeypatch):
    made = Connector(module, tmp_path, [["model.layers.0.attn"]])  # an earlier stage of a pipeline
    made.worker.register_kv_caches({"model.layers.0.attn": torch.zeros(1)})
    made.worker.save_kv_layer("model.layers.0.attn", None, None)
    assert made.finish(0, [1, 2], ([4],)) == (True, None)
    monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: 1)
    made.worker.register_kv_caches({CACHE: made.cache})
    made.worker.save_kv_layer(CACHE, None, None)
    assert made.finish(0, [1, 2], ([4],)) == (True, None)
    assert made.worker.get_finished_count() == 1 and list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_understood_is_refused(module, tmp_path):
    with pytest.raises(
        ValueError, match="0 groups of vLLM's cache hold cache_only_layers, expected one"
    ):
        Connector(module, tmp_path, [["a"], ["b"]])
    made = Connector(module, tmp_path, [["a", CACHE]])
    with pytest.raises(ValueError, match="blocks of 16 tokens in the cache, 4 in the scheduler"):
        made.worker.register_kv_caches({CACHE: torch.zeros(2, LAYERS, 16, 8)})


def test_a_failed_write_ends_vllm(connector, module, monkeypatch, capfd):
    ended = []
    monkeypatch.setattr(module.os, "killpg", lambda *args: ended.append(args))
    connector.worker.spool = connector.folder / "gone"
    connector.fill(CACHE, [1], 0, torch.zeros(2, LAYERS, 8))
    connector.finish(0, [1, 2], ([], [1]))
    assert ended == [(0, signal.SIGKILL)] and "FileNotFoundError" in capfd.readouterr().err


# --- the worker's loop --------------------------------------------------------------------------


class FakeEngine:
    """Reads a document in two steps."""

    def __init__(self):
        self.requests, self.left, self.idle_steps = [], [], 0

    def add_request(self, name, prompt, params):
        self.requests.append((name, prompt["prompt_token_ids"], params.extra_args))
        self.left.append(2)

    def has_unfinished_requests(self):
        return bool(self.left)

    def step(self):
        self.idle_steps += not self.left
        self.left = [n - 1 for n in self.left if n > 1]


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = ModuleType("vllm")
    vllm.SamplingParams = SimpleNamespace
    monkeypatch.setitem(sys.modules, "vllm", vllm)


def test_the_worker_asks_for_what_comes_in(fake_vllm):
    engine, inbox = FakeEngine(), queue.Queue()
    documents = [{"index": i, "sample_id": f"s{i}", "ids": [i, i]} for i in range(3)]
    for document in [*documents, None]:
        inbox.put(document)
    vllm_worker.serve(engine, inbox)
    assert [(name, ids) for name, ids, _ in engine.requests] == [
        (f"s{i}", [i, i]) for i in range(3)
    ]
    assert engine.requests[2][2] == {"kv_transfer_params": {"index": 2, "sample_id": "s2"}}


def test_the_worker_steps_when_idle_and_notices_dead_processes(fake_vllm, monkeypatch):
    """A finished request reaches the connector with the next step, so there must be one."""
    dead = SimpleNamespace(is_alive=lambda: False)
    monkeypatch.setattr(vllm_worker, "active_children", lambda: [dead])
    engine = FakeEngine()
    with pytest.raises(RuntimeError, match="a process of vLLM's ended"):
        vllm_worker.serve(engine, queue.Queue())
    assert engine.idle_steps == 1


def test_the_end_of_the_input_ends_the_worker(tmp_path, monkeypatch):
    ended, inbox = [], queue.Queue()
    monkeypatch.setattr(vllm_worker.os, "killpg", lambda *args: ended.append(args))
    monkeypatch.setattr(vllm_worker, "GRACE_S", 0)
    (tmp_path / "spool").mkdir()
    vllm_worker.receive(io.StringIO('{"index": 0}\n'), inbox, tmp_path / "spool")
    assert (inbox.get_nowait(), inbox.get_nowait()) == ({"index": 0}, None)
    assert not (tmp_path / "spool").exists() and ended == [(0, signal.SIGKILL)]


def test_what_vllm_is_told():
    args = vllm_worker.engine_args({"model": "m"}, [0, 3], "/spool")
    layers = args["speculative_config"]["draft_model_config"]["hf_config"]
    assert layers == {"eagle_aux_hidden_state_layer_ids": [1, 4]}
    assert args["enable_prefix_caching"] is False and args["model"] == "m"
    assert args["kv_transfer_config"]["kv_connector_extra_config"] == {"spool": "/spool"}


# --- the stage, with a stub in place of vLLM's interpreter --------------------------------------

STUB = """\
#!{python}
import array, hashlib, json, os, select, subprocess, sys

def say(**what):
    with open({said!r}, "a") as f:
        f.write(json.dumps(what) + "\\n")

assert sys.argv[1:] == ["-m", "dflash.vllm_worker"]
job = json.loads(sys.stdin.readline())
say(job=job, path=os.listdir(os.environ["PYTHONPATH"]), helper=subprocess.Popen(["sleep", "300"]).pid)
open(job["spool"] + "/ready", "w").close()

def value(index, token, layer, channel):
    return index + token / 64 + layer / 4 + channel / 8

def put(d):
    ids, layers, channels = d["ids"], range(len(job["layers"])), range({hidden})
    data = array.array("f", [value(d["index"], t, l, c) for t in ids for l in layers for c in channels])
    header = dict(sample_id=d["sample_id"], dtype="float32", shape=[len(ids), len(layers), len(channels)],
                  ids_sha256=hashlib.sha256(array.array("i", ids).tobytes()).hexdigest())
{change}
    path = "%s/%08d" % (job["spool"], d["index"])
    with open(path + ".partial", "wb") as f:
        f.write(json.dumps(header).encode() + b"\\n" + data.tobytes())
    os.rename(path + ".partial", path + ".states")

# Take in all that is sent, and only then answer, last things first: order and bounds are the stage's.
buffer, batch, tokens = b"", [], {{}}
while True:
    if select.select([0], [], [], 0.2)[0]:
        more = os.read(0, 1 << 20)
        if not more:
            break
        *lines, buffer = (buffer + more).split(b"\\n")
        for line in map(json.loads, lines):
            batch.append(line)
            tokens[line["index"]] = len(line["ids"])
        there = {{int(n[:8]) for n in os.listdir(job["spool"]) if n.endswith(".states")}}
        waiting = {{d["index"] for d in batch}}
        say(underway=sum(tokens[i] for i in there | waiting))
    else:
        for d in reversed(batch):
            put(d)
        batch = []
"""


def value(index: int, row: TokenRow) -> np.ndarray:
    """What the stub gives for a document: [S, L, H]."""
    ids = row.input_ids.astype(np.float32)[:, None, None]
    layer, channel = np.arange(LAYERS, dtype=np.float32), np.arange(HIDDEN, dtype=np.float32)
    return index + ids / 64 + layer[:, None] / 4 + channel / 8


class Stub:
    """A stage run with a stub; `said` is what that told."""

    def __init__(self, folder: Path, identity: Path):
        self.folder, self.identity = folder, identity
        self.out = folder / "features" / "a.zarr"

    def run(
        self,
        change: str = "",
        rows: list[TokenRow] | None = None,
        spool_mb: int = 100,
        max_tokens: int = 100,
    ) -> Path:
        python = self.folder / "stub"
        python.write_text(
            STUB.format(
                python=sys.executable,
                said=str(self.folder / "said"),
                hidden=HIDDEN,
                change=textwrap.indent(change, "    "),
            )
        )
        python.chmod(0o755)
        write_tokens(self.folder / "tokens.parquet", rows or some_rows())
        settings = SETTINGS | {"backend": "vllm", "max_tokens": max_tokens}
        machine = {"vllm": {"python": str(python), "spool_mb": spool_mb}}
        extract.main(
            [
                *("--settings", json.dumps(settings)),
                *("--machine", json.dumps(machine)),
                *("--identity", str(self.identity), "--tokens", f"{self.folder}/tokens.parquet"),
                *("--threads", "1", "--out", str(self.out)),
            ]
        )
        return self.out

    def said(self, key: str) -> list:
        lines = map(json.loads, (self.folder / "said").read_text().splitlines())
        return [line[key] for line in lines if key in line]

    def nothing_is_left(self) -> bool:
        """Whether no shard, no spool and none of the stub's processes is there."""
        (helper,) = self.said("helper")
        end = time.monotonic() + 10
        while (state := _state(helper)) not in (None, "Z") and time.monotonic() < end:
            time.sleep(0.01)
        return state in (None, "Z") and list(self.out.parent.iterdir()) == []


def _state(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except FileNotFoundError:
        return None


@pytest.fixture
def stub(tmp_path: Path, tiny_llama: Path, identity_file: Callable[[Path], Path]) -> Stub:
    return Stub(tmp_path, identity_file(tiny_llama))


def test_vllm_needs_a_position_for_the_token_it_samples(stub):
    with pytest.raises(UserError, match="may reach 513 tokens, and .* has 512 positions"):
        stub.run(rows=some_rows([512]), max_tokens=512)


def test_a_shard_from_a_child_that_answers_out_of_order(stub):
    shard = open_shard(stub.run())
    rows = sorted(some_rows(), key=lambda r: (-len(r.input_ids), r.sample_id))
    assert shard.sample_ids == [r.sample_id for r in rows]
    for i, row in enumerate(rows):
        document = shard.read(i)
        assert np.array_equal(document.input_ids, row.input_ids)
        expected = torch.from_numpy(value(i, row)).to(torch.bfloat16)
        assert torch.equal(as_float(document.hidden), expected.float())
    (job,) = stub.said("job")
    assert job["layers"] == TAPS and job["engine"]["max_model_len"] == 71
    assert stub.said("path") == [["dflash"]]  # no other package of ours is in vLLM's way
    assert sorted(p.name for p in stub.out.parent.iterdir()) == ["a.json", "a.zarr"]


def test_the_spool_is_bounded(stub):
    """192 float32 values a token: 1 MB holds 1302 of them, and a larger document goes alone."""
    rows = some_rows([1400, 700, 600, 500, 400, 300, 200])
    identity = json.loads(stub.identity.read_text())
    stub.identity.write_text(json.dumps(identity | {"max_position_embeddings": 2048}))
    stub.run(rows=rows, spool_mb=1, max_tokens=2000)
    first, *later = stub.said("underway")
    assert first == 1400 and max(later) == 700 + 600


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ('header["sample_id"] = "f" * 16', "handed over sample_id ffff.*, expected"),
        ('header["ids_sha256"] = "0"', "handed over ids_sha256 0, expected"),
        ('header["shape"][0] -= 1', r"handed over shape \[69, 3, 64\], expected \[70, 3, 64\]"),
        ("del data[-1]", r"handed over 53756 bytes, expected \[70, 3, 64\] of float32"),
        ('data[5] = float("nan")', "the target's layer 0 gave NaN at token 0, channel 5"),
    ],
)
def test_states_that_cannot_be_right_stop_the_shard(stub, change, words):
    with pytest.raises(UserError, match=words) as e:
        stub.run(change)
    assert max(some_rows(), key=lambda r: len(r.input_ids)).sample_id in str(e.value)
    assert stub.nothing_is_left()


@pytest.mark.parametrize(
    ("change", "how"),
    [
        ('raise ValueError("no room")', r"ended with status 1 .*\(ValueError: no room\)"),
        ("os.kill(os.getpid(), 9)", r"was killed by signal 9 .*\(it named no error\)"),
    ],
)
def test_a_child_that_dies_midway(stub, change, how, capfd):
    with pytest.raises(UserError, match=f"vLLM {how}.*docs/vllm.md.*backend: transformers") as e:
        stub.run(f'if d["index"] == 3:\n    {change}')
    assert "handed over sample" in str(e.value) and "\n" not in str(e.value)
    assert ("Traceback" in capfd.readouterr().err) == ("ValueError" in change)
    assert stub.nothing_is_left()


def test_interpreters_that_cannot_do_it(stub, refusal):
    argv = ["--settings", json.dumps(SETTINGS | {"backend": "vllm"}), "--identity", stub.identity]
    write_tokens(stub.folder / "tokens.parquet", some_rows())
    argv += ["--tokens", stub.folder / "tokens.parquet", "--out", stub.out, "--machine"]
    said = refusal(extract.main, *argv, json.dumps({"vllm": {"python": "/no/python"}}))
    assert "machine.extract.vllm.python: /no/python cannot be started (no such file" in said
    with pytest.raises(UserError, match="before it had loaded .*No module named 'vllm'"):
        extract.main([*map(str, argv), "{}"])  # the running interpreter
    assert list(stub.out.parent.iterdir()) == []


@pytest.mark.parametrize("taps", [[2, 0], [0, 0], [0, 4], [-1, 2]])
def test_layers_that_vllm_would_mix_up_or_ignore(taps):
    with pytest.raises(UserError, match=r"taps \[.*\]: expected rising layer ids from 0 to 3"):
        extract_vllm.layers_of(taps, False, 4)


def test_layers_to_ask_for():
    assert extract_vllm.layers_of([0, 2], False, 4) == [0, 2]
    assert extract_vllm.layers_of([0, 2], True, 4) == [0, 2, 3]
    assert extract_vllm.layers_of([0, 3], True, 4) == [0, 3]


def test_the_last_layer_goes_apart():
    row = some_rows([5])[0]
    states = torch.randn(5, 3, 8)
    bits = states.to(torch.bfloat16).view(torch.uint16).numpy()
    (document,) = extract_vllm.documents([row], iter([states]), 2, True)
    assert np.array_equal(document.hidden, bits[:, :2])
    assert np.array_equal(document.last_hidden, bits[:, 2])


def test_settings():
    demo = config.demo_workflow()
    assert "backend" not in json.loads(
        config.stage_settings(demo, "extract")
    )  # as before there were two
    other = demo.model_copy(update={"extract": config.Extract(backend="vllm")})
    assert json.loads(config.stage_settings(other, "extract"))["backend"] == "vllm"
    machine = {"gpu": 3, "vllm": {"tensor_parallel": 2, "pipeline_parallel": 2}}
    with pytest.raises(UserError, match="take 4 GPUs, but a job has gpu 3"):
        config.check(config.ExtractMachine, machine, "--machine")
    for gpu in (0, 4):
        config.check(config.ExtractMachine, machine | {"gpu": gpu}, "--machine")


# --- the real one -------------------------------------------------------------------------------


@pytest.mark.skipif(
    "DFLASH_VLLM_PYTHON" not in os.environ,
    reason="DFLASH_VLLM_PYTHON names no interpreter that has vLLM (envs/vllm.sh makes one)",
)
def test_vllm_gives_the_targets_own_states(tmp_path, identity_of, identity_file):
    torch.manual_seed(0)
    wide = SHAPE | {"head_dim": 32}  # the least that vLLM's attention takes on a CPU
    folder = save_tiny(Qwen3ForCausalLM(Qwen3Config(**wide)), tmp_path / "wide", end_factor=2)
    write_tokens(tmp_path / "tokens.parquet", some_rows())
    vllm = {"python": os.environ["DFLASH_VLLM_PYTHON"], "gpu_memory_utilization": 0.1}
    extract.main(
        [
            *(
                "--settings",
                json.dumps(SETTINGS | {"backend": "vllm", "last_hidden": True, "taps": [0, 2]}),
            ),
            *("--machine", json.dumps({"batch_tokens": 32, "vllm": vllm})),
            *("--identity", str(identity_file(folder))),
            *("--tokens", f"{tmp_path}/tokens.parquet", "--out", f"{tmp_path}/a.zarr"),
        ]
    )
    shard, model = open_shard(tmp_path / "a.zarr"), load_model(identity_of(folder), "float32")
    by_id = {row.sample_id: row for row in some_rows()}
    for i, sample in enumerate(shard.sample_ids):
        d = shard.read(i, last_hidden=True)
        found = as_float(np.concatenate([d.hidden, d.last_hidden[:, None]], 1))
        expected = alone(model, by_id[sample], [0, 2, 3])
        assert torch.cosine_similarity(found, expected, dim=-1).min() > 0.9999
