"""Extraction on the device: the CPU's states, copied by a stream of its own; and the vLLM connector's."""

from __future__ import annotations

import os
import time
from contextlib import closing

import numpy as np
import pytest
import torch
from support.cuda import device
from support.targets import SHAPE
from support.vllm import CACHE, LAYERS, Connector, connector_module
from test_extract import some_rows
from test_families import FAMILIES
from transformers import AutoModelForCausalLM

from dflash import extract, spool
from dflash.errors import UserError
from dflash.extract import Batches, documents
from dflash.taps import Taps

TAPS = [0, 2, 3]
LENGTHS = [33, 5, 70, 33, 2, 48, 17, 64]


def model_of(name: str, where: str):
    config_class, more = FAMILIES[name]
    torch.manual_seed(3)
    config = config_class(**SHAPE | more)
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False).to(where)


def states_of(model, rows, tokens=150) -> dict[str, np.ndarray]:
    batches = Batches(tokens)
    with (
        Taps(model, TAPS, torch.bfloat16) as taps,
        closing(documents(model, taps, rows, batches)) as found,
    ):
        return {d.sample_id: d.hidden.copy() for d in found}


def as_float(bits) -> torch.Tensor:
    return torch.from_numpy(bits).view(torch.bfloat16).float()


def sorted_rows():
    return sorted(some_rows(LENGTHS), key=lambda row: -len(row.input_ids))


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3-next"])
def test_the_states_of_three_families(name):
    rows = sorted_rows()
    with device.waits() as waits:
        found = states_of(model_of(name, "cuda"), rows)
    wanted = states_of(model_of(name, "cpu"), rows)
    for row in rows:
        a, b = as_float(found[row.sample_id]), as_float(wanted[row.sample_id])
        assert a.shape == (len(row.input_ids), len(TAPS), SHAPE["hidden_size"])
        torch.testing.assert_close(a, b, rtol=0.02, atol=2e-3)
    batches = sum("_cut" in w for w in waits)
    ours = [w for w in waits if "extract.py" in w and "modeling" not in w]
    assert batches >= 3 and len(ours) <= 2 * batches  # ids up, states waited for


@pytest.mark.parametrize(
    "fault, words",
    [
        ("no wait for the model", "without waiting for it"),
        ("no record_stream", "record_stream was not called"),
        ("no wait for the copy", None),
    ],
)
def test_faults_in_the_copies_are_seen(monkeypatch, fault, words):
    """That the test above would see them."""
    rows, synchronize = sorted_rows(), torch.cuda.Event.synchronize

    def late(event):  # the model has begun with the next batch
        time.sleep(0.05)
        synchronize(event)

    monkeypatch.setattr(torch.cuda.Event, "synchronize", late)
    if fault == "no wait for the model":
        monkeypatch.setattr(torch.cuda.Stream, "wait_stream", lambda self, other: None)
    elif fault == "no record_stream":
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    else:
        monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda self: None)
    model = model_of("llama", "cuda")
    try:
        found = states_of(model, rows)
    except RuntimeError as e:
        assert words in str(e)
    else:
        if words is None:
            assert any(as_float(x).isnan().any() for x in found.values())
    monkeypatch.undo()
    said = device.faults()
    assert words is None or any(words in x for x in said)


def test_memory_that_does_not_suffice_halves_the_batch(capfd):
    rows = some_rows([70] * 8)
    model = model_of("llama", "cuda")
    whole = states_of(model, rows, 560)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    states_of(model, rows, 560)
    needed = torch.cuda.max_memory_allocated() - before
    capfd.readouterr()
    with device.limit(needed * 2 // 3):
        found = states_of(model, rows, 560)
    said = capfd.readouterr().err
    assert "out of memory with 560 tokens at once, going on with 280" in said
    for sample_id, hidden in whole.items():
        torch.testing.assert_close(
            as_float(found[sample_id]), as_float(hidden), rtol=0.02, atol=2e-3
        )
    with device.limit(1000), pytest.raises(UserError, match="not even this one document"):
        states_of(model, rows[:1], 70)


def test_the_final_norm_is_checked_on_the_device():
    extract.check_final_norm(model_of("llama", "cuda"))


# --- the vLLM connector ---------------------------------------------------------------------------


@pytest.fixture
def connector(monkeypatch, tmp_path):
    with connector_module(monkeypatch) as module:
        made = Connector(module, tmp_path, [["model.layers.0.attn"], [CACHE]], "cuda")
        made.worker.register_kv_caches({"model.layers.0.attn": torch.zeros(1), CACHE: made.cache})
        # one storage for all requests' blocks: what is read of one and written of another does not overlap
        with device.without_races():
            yield made


def test_states_leave_the_cache_without_a_wait(connector):
    one, two = torch.randn(10, LAYERS, 8), torch.randn(7, LAYERS, 8)
    connector.fill(CACHE, [5, 2, 9], 0, one)
    connector.fill(CACHE, [3, 11], 0, two)
    with device.waits() as waits:
        held, done = connector.finish(1, list(range(7)), ([0], [3, 11]))
    assert held and done is None and waits == []  # not there yet, and nobody waits
    with device.waits() as waits:
        _, done = connector.finish(0, list(range(10)), ([0], [5, 2, 9]))
        done |= connector.step() or set()
        done |= connector.step() or set()
    assert done == {"r0-x", "r1-x"} and waits == []
    for index, states in ((1, two), (0, one)):
        path = spool.place(connector.folder, index)
        found = spool.take(path, f"{index:016x}", list(range(len(states))), LAYERS, 8)
        assert torch.equal(found, states)
    assert connector.step() is None


def test_a_step_without_tokens_waits(connector):
    """It has nothing else to do, and may be the last one."""
    states = torch.randn(7, LAYERS, 8)
    connector.fill(CACHE, [3, 11], 0, states)
    assert connector.finish(1, list(range(7)), ([0], [3, 11])) == (True, None)
    connector.fill(CACHE, [5, 2], 0, states)
    _, done = connector.finish(2, list(range(7)), ([0], [5, 2]), tokens=0)
    assert done == {"r1-x", "r2-x"}


def test_slots_that_no_step_filled_are_noticed_when_they_have_come(connector):
    connector.fill(CACHE, [5, 2], 0, torch.randn(6, LAYERS, 8))
    connector.finish(1, list(range(8)), ([], [5, 2]))
    with pytest.raises(RuntimeError, match="sample 0{15}1: vLLM kept the states of 6 of 8 tokens"):
        for _ in range(3):
            connector.step()


def test_a_copy_that_is_reported_too_early_is_seen(connector, monkeypatch):
    """That the first test would see it: memory that has not come is no state."""
    states = torch.randn(7, LAYERS, 8)
    connector.fill(CACHE, [3, 11], 0, states)
    monkeypatch.setattr(torch.cuda.Event, "query", lambda self: True)
    _, done = connector.finish(1, list(range(7)), ([0], [3, 11]))
    assert done == {"r1-x"}
    path = spool.place(connector.folder, 1)
    found = spool.take(path, f"{1:016x}", list(range(7)), LAYERS, 8)
    assert found.isnan().all()
    os.remove(path)
