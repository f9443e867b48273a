"""Extraction: every stored tap is the target's own hidden state of the document alone."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from dflash import config, extract, features
from dflash.errors import UserError
from dflash.extract import Batches
from dflash.features import open_shard
from dflash.regenerate import TokenRow, write_tokens
from dflash.taps import Taps
from dflash.target import load_embedding_and_head, load_final_norm, load_model

LENGTHS = [33, 5, 70, 33, 2, 48, 17, 64]
TAPS = [0, 2, 3]
SETTINGS = {
    "stage": "extract",
    "version": 1,
    "taps": TAPS,
    "dtype": "float32",
    "trust_remote_code": False,
    "max_tokens": 100,
}


def some_rows(lengths: list[int] = LENGTHS, prompt: int = 1) -> list[TokenRow]:
    """Rows whose first `prompt` tokens are the prompt's."""
    rng = np.random.default_rng(3)
    return [
        TokenRow(
            f"{rng.integers(1 << 62):016x}",
            "quick",
            "code",
            "train",
            rng.integers(4, 320, n).astype(np.int32),
            np.arange(n) >= prompt,
        )
        for n in lengths
    ]


@pytest.fixture(params=["tiny_llama", "tiny_qwen3"])  # one tied, one untied
def folder(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


@pytest.fixture
def run(tmp_path: Path, tiny_llama: Path, identity_file: Callable[[Path], Path]) -> Callable:
    """Runs the stage on rows as Snakemake would; returns the path of the shard."""

    def go(
        rows: list[TokenRow] | None,
        folder: Path = tiny_llama,
        batch_tokens: int = 200,
        out: Path = tmp_path / "features" / "quick" / "00000-of-00001.zarr",
        identity: Path | None = None,
        machine: dict[str, Any] | None = None,
        **settings,
    ) -> Path:
        tokens = tmp_path / "tokens.parquet"
        if rows is not None:
            write_tokens(tokens, rows)
        extract.main(
            [
                *("--settings", json.dumps(SETTINGS | settings)),
                *("--machine", json.dumps({"batch_tokens": batch_tokens} | (machine or {}))),
                *("--identity", str(identity or identity_file(folder))),
                *("--tokens", str(tokens), "--threads", "1"),
                *("--out", str(out), "--manifest", str(out.with_suffix(".json"))),
            ]
        )
        return out

    return go


def alone(model: nn.Module, row: TokenRow, taps: list[int] = TAPS) -> torch.Tensor:
    """The slow obvious way: one document, every layer's output; [S, T, H] float32."""
    ids = torch.from_numpy(row.input_ids).long()[None]
    caught = []
    handle = model.model.norm.register_forward_pre_hook(lambda _, x: caught.append(x[0][0]))
    with torch.inference_mode():
        states = model(ids, output_hidden_states=True).hidden_states
    handle.remove()
    last = len(model.model.layers) - 1  # Hugging Face gives it after the final norm
    return torch.stack([caught[0] if i == last else states[i + 1][0] for i in taps], 1)


def ulps(bits: np.ndarray, exact: torch.Tensor) -> np.ndarray:
    """Distance in bf16 steps between stored bits and the rounded exact values."""

    def rank(x: np.ndarray) -> np.ndarray:  # monotone in the value
        x = x.astype(np.int32)
        return np.where(x & 0x8000, -(x & 0x7FFF), x)

    return abs(rank(bits) - rank(exact.to(torch.bfloat16).view(torch.uint16).numpy()))


def as_float(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits).view(torch.bfloat16).float()


@pytest.mark.parametrize("batch_tokens", [1, 150, 10_000])
def test_every_tap_equals_the_models_own(run, folder, batch_tokens):
    rows = {row.sample_id: row for row in some_rows()}
    shard = open_shard(run(list(rows.values()), folder, batch_tokens))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert set(shard.sample_ids) == set(rows) and len(shard) == len(LENGTHS)
    for i in range(len(shard)):
        document = shard.read(i)
        row = rows[document.sample_id]
        exact = alone(model, row)
        assert np.array_equal(document.input_ids, row.input_ids)
        assert np.array_equal(document.loss_mask, row.loss_mask)
        # Values near zero next to large ones may round to another neighbour: by one step at most,
        # unless they vanish beside the row's size.
        away = ulps(document.hidden, exact)
        tiny = (exact.abs() < 1e-4 * exact.abs().amax()).numpy()
        assert away[~tiny].max() <= 1 and (away > 0).mean() < 0.01
        stored = as_float(document.hidden)
        cosine = nn.functional.cosine_similarity(stored, exact, dim=-1)
        assert cosine.min() > 0.9999
        for t, wrong in ((0, 1), (1, 1), (1, 3), (2, 2)):  # a neighbouring layer must not pass
            other = alone(model, row, [wrong])[:, 0]
            assert nn.functional.cosine_similarity(stored[:, t], other, dim=-1).mean() < 0.999


def test_bfloat16_compute(run, folder):
    rows = {row.sample_id: row for row in some_rows()}
    shard = open_shard(run(list(rows.values()), folder, dtype="bfloat16"))
    assert shard.identity["compute_dtype"] == "bfloat16"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for i in range(len(shard)):
        document = shard.read(i)
        exact = alone(model, rows[document.sample_id])
        cosine = nn.functional.cosine_similarity(as_float(document.hidden), exact, dim=-1)
        assert cosine.min() > 0.99


def test_order_is_fixed_and_batches_do_not_matter(run, tmp_path):
    rows = some_rows()
    expected = [r.sample_id for r in sorted(rows, key=lambda r: (-len(r.input_ids), r.sample_id))]
    one = open_shard(run(rows, batch_tokens=1))
    many = open_shard(run(rows[::-1], batch_tokens=5000, out=tmp_path / "b.zarr"))
    assert one.sample_ids == many.sample_ids == expected
    for i in range(len(one)):
        a, b = as_float(one.read(i).hidden), as_float(many.read(i).hidden)
        assert torch.allclose(a, b, rtol=0.01, atol=1e-3)


def test_identity_and_counts(run, folder, identity_file, tmp_path, capsys):
    target = extract.read_identity(identity_file(folder))
    rows = some_rows([20, 30, 40, 1, 25])
    rows += [TokenRow("f" * 16, "quick", "code", "train", rows[0].input_ids, np.arange(20) > 90)]
    late = TokenRow("e" * 16, "quick", "code", "train", rows[2].input_ids, np.arange(40) >= 25)
    path = run([*rows, late], folder, max_tokens=25)
    shard = open_shard(path, features.store_identity(target))
    said = capsys.readouterr().out
    assert shard.counts == {
        "documents": 4,
        "tokens": 20 + 25 + 25 + 25,
        "supervised_tokens": 19 + 24 * 3,
        "documents_cut": 2,
        "documents_too_short": 1,
        "documents_without_supervision": 2,
    }
    assert "4 documents, 2 cut at 25 tokens, 1 of fewer than 2 tokens left out, 2 without a" in said
    assert "95 tokens" in said and " MB, " in said and "tokens/s on cpu" in said
    assert shard.identity["model"] == str(folder) and shard.taps == TAPS
    assert shard.identity["weights_sha256"] == target.weights_sha256
    cut = {len(r.input_ids): r for r in rows}[40]
    got = shard.read(shard.sample_ids.index(cut.sample_id))
    assert np.array_equal(got.input_ids, cut.input_ids[:25])


def test_nothing_left(run):
    with pytest.raises(UserError, match="no document is left.*1 have fewer than two tokens and 1 "):
        run([*some_rows([1]), *some_rows([30, 20], prompt=20)[1:]])
    with pytest.raises(UserError, match="among the first 9; raise `extract.max_tokens`"):
        run(some_rows([20], prompt=10), max_tokens=9)


def test_tokens_of_another_vocabulary(run):
    rows = some_rows([10])
    rows[0].input_ids[4] = 320
    with pytest.raises(UserError, match=rf"sample {rows[0].sample_id} holds tokens .* to 320, the"):
        run(rows)


def test_the_same_sample_twice(run):
    row = some_rows([10])[0]
    with pytest.raises(UserError, match=f"sample {row.sample_id} occurs twice"):
        run([row, row])


def test_damaged_or_missing_tokens(run, tmp_path):
    with pytest.raises(UserError, match="tokens.parquet"):
        run(None)
    (tmp_path / "tokens.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match="tokens.parquet"):
        run(None)
    pq.write_table(pa.table({"sample_id": ["a"]}), tmp_path / "tokens.parquet")
    with pytest.raises(UserError, match="tokens.parquet"):
        run(None)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("input_ids", [5, None, 7], "row 0: `input_ids` has no value"),
        ("loss_mask", [True, None, True], "row 0: `loss_mask` has no value"),
        ("kind", None, "row 0: `kind` has no value"),
        ("loss_mask", [True, True], "row 0: `loss_mask` has 2 values for 3 `input_ids`"),
        ("sample_id", "ABC", "sample id 'ABC', expected 16 of the digits"),
    ],
)
def test_tokens_of_other_programs_are_checked_before_the_target_is_loaded(
    run, tmp_path, monkeypatch, field, value, words
):
    monkeypatch.setattr(extract, "load_model", None)
    write_tokens(tmp_path / "tokens.parquet", some_rows([3]))
    table = pq.read_table(tmp_path / "tokens.parquet")
    column = pa.array([value], table.schema.field(field).type)
    index = table.schema.get_field_index(field)
    pq.write_table(table.set_column(index, table.schema.field(field), column), tmp_path / "new")
    (tmp_path / "new").rename(tmp_path / "tokens.parquet")
    with pytest.raises(UserError, match=f"tokens.parquet.*{words}.*run the regenerate stage again"):
        run(None)


def test_no_document_at_all(run):
    with pytest.raises(UserError, match="tokens.parquet: holds no document; delete the file"):
        run([])


def test_documents_beyond_the_targets_positions_are_refused(run, monkeypatch):
    monkeypatch.setattr(extract, "load_model", None)
    with pytest.raises(UserError, match="reach 600 tokens.*512 positions.*lower `extract.max_tok"):
        run(some_rows([5, 600]), max_tokens=700)


def test_a_padding_token_without_a_row_does_no_harm(run, tiny_llama, identity_of, tmp_path):
    path = tmp_path / "odd.json"
    path.write_text(json.dumps(asdict(identity_of(tiny_llama)) | {"pad_token_id": 999}))
    shard = open_shard(run(some_rows([20, 9, 30]), identity=path))
    assert len(shard) == 3


def test_wrong_settings(run):
    for taps in ([0, 4], [1, 1], [-1]):
        with pytest.raises(UserError, match="`taps`: found .*; expected layer ids from 0 to 3"):
            run(some_rows(), taps=taps)
    with pytest.raises(UserError, match="`machine.extract.parallel`: found tensor with extract.ba"):
        run(some_rows(), backend="vllm", machine={"parallel": "tensor"})
    with pytest.raises(UserError, match="--settings: `taps`"):
        run(some_rows(), taps=[])
    with pytest.raises(UserError, match="unknown key `maximum`"):
        run(some_rows(), maximum=3)


@pytest.mark.parametrize("codec", ["compact", "int8"])
def test_a_shard_of_another_codec_is_made_anew_and_then_left_alone(run, capsys, codec, monkeypatch):
    rows = some_rows()
    path = run(rows)
    raw = open_shard(path).read(0)
    run(rows, codec=codec)
    assert f"codec is 'raw' here, '{codec}' is asked for" in capsys.readouterr().out
    shard = open_shard(path, {"codec": codec})
    assert (shard.read(0).hidden == raw.hidden).all() == (codec == "compact")
    before = {f: f.stat().st_mtime_ns for f in path.rglob("*")}
    monkeypatch.setattr(extract, "load_model", lambda *_: pytest.fail("loaded the model again"))
    run(rows, codec=codec)
    assert {f: f.stat().st_mtime_ns for f in path.rglob("*")} == before


def test_a_finished_shard_is_left_alone(run, monkeypatch, capsys):
    rows = some_rows()
    path = run(rows)
    before = {f: f.stat().st_mtime_ns for f in path.rglob("*")}
    with monkeypatch.context() as m:
        m.setattr(extract, "load_model", lambda *_, **__: pytest.fail("loaded the model again"))
        run(rows, batch_tokens=77)
    said = capsys.readouterr().out
    assert "already there, its checksums are checked when it is read; nothing to do" in said
    assert {f: f.stat().st_mtime_ns for f in path.rglob("*")} == before
    # Other settings, other tokens, or damage: made again, saying why.
    for change, words in (
        (lambda: run(rows, taps=[1]), "taps is [0, 2, 3] here, [1] is asked for"),
        (lambda: run(rows[:5], taps=[1]), "tokens_sha256 is"),
        (lambda: (os.truncate(path / "hidden/c/0/0/0", 99), run(rows[:5], taps=[1])), "damaged"),
    ):
        change()
        said = capsys.readouterr().out
        assert "making the shard anew, because" in said and words in said
    shard = open_shard(path)
    assert shard.taps == [1] and len(shard) == 5 and shard.read(4)


def test_a_whole_shard_without_its_manifest_gets_one(run, monkeypatch, capsys):
    rows = some_rows()
    path = run(rows)
    manifest = path.with_suffix(".json")
    text, before = manifest.read_text(), {f: f.stat().st_mtime_ns for f in path.rglob("*")}
    manifest.unlink()  # killed between shard and manifest
    with monkeypatch.context() as m:
        m.setattr(extract, "load_model", lambda *_, **__: pytest.fail("loaded the model again"))
        run(rows)
    assert manifest.read_text() == text
    assert {f: f.stat().st_mtime_ns for f in path.rglob("*")} == before
    assert "is whole, its manifest was missing and is written again" in capsys.readouterr().out
    # Not if it is damaged where only reading shows it, or anything else.
    last = sorted(path.glob("hidden/c/*/0/0"))[-1]
    last.write_bytes(bytes([last.read_bytes()[0] ^ 1]) + last.read_bytes()[1:])
    manifest.unlink()
    run(rows)
    said = capsys.readouterr().out
    assert "making the shard anew, because" in said and "a checksum is wrong" in said
    manifest.unlink()
    run(rows, taps=[1])
    said = capsys.readouterr().out
    assert "making the shard anew, because" in said and "[1] is asked for" in said
    assert features.verify(path)["taps"] == [1]


def test_why_a_shard_is_made_anew_is_always_said(run, monkeypatch, capsys):
    rows = some_rows()
    path = run(rows)
    select = extract.select
    with monkeypatch.context() as m:  # a newer program selects other documents from the same file
        m.setattr(extract, "select", lambda *a: (select(*a)[0][1:], select(*a)[1]))
        run(rows)
    said = capsys.readouterr().out
    assert f"anew, because {path}: its 8 documents are not the 7 that are asked for" in said
    assert len(open_shard(path)) == 7
    for file in sorted(path.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    path.rmdir()
    run(rows)
    said = capsys.readouterr().out
    assert f"anew, because {path}: no such shard" in said


class Memory:
    """Stands before a model's first layer and lets only so many tokens pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tokens: int):
        self.tokens, self.passed, load = tokens, [], extract.load_model

        def limited(*args, **options):
            model = load(*args, **options)
            model.model.layers[1].register_forward_pre_hook(self)
            return model

        monkeypatch.setattr(extract, "load_model", limited)

    def __call__(self, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        size = inputs[0].shape[0] * inputs[0].shape[1]
        if size > self.tokens:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        self.passed.append(size)


def test_out_of_memory_halves_the_batch(run, tmp_path, monkeypatch, capfd):
    rows = some_rows([70] * 8 + [40] * 8)
    whole = open_shard(run(rows, batch_tokens=560, out=tmp_path / "whole.zarr"))
    memory = Memory(monkeypatch, tokens=140)
    shard = open_shard(run(rows, batch_tokens=560))
    said = [x for x in capfd.readouterr().err.splitlines() if "out of memory" in x]
    assert "560 tokens at once, going on with 280; set `machine.extract.batch_tokens`" in said[0]
    assert len(said) == 2 and memory.passed == [140] * 4 + [120, 120, 80]
    assert shard.sample_ids == whole.sample_ids
    for i in range(len(shard)):
        a, b = as_float(shard.read(i).hidden), as_float(whole.read(i).hidden)
        assert torch.allclose(a, b, rtol=0.01, atol=1e-3)


def test_one_document_that_does_not_fit(run, tmp_path, monkeypatch):
    Memory(monkeypatch, tokens=69)
    longest = max(some_rows(), key=lambda row: len(row.input_ids))
    with pytest.raises(UserError, match=rf"sample {longest.sample_id}: not even this one doc"):
        run(some_rows(), batch_tokens=300)
    assert list((tmp_path / "features" / "quick").iterdir()) == []


def test_other_runtime_errors_are_not_swallowed(run, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(extract, "run_decoder", fail)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        run(some_rows())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3.4e38])  # which rounds to inf
def test_nonfinite_features_stop_the_shard(run, tmp_path, monkeypatch, value):
    rows, load = some_rows(), extract.load_model

    def spoil(module: nn.Module, inputs: tuple, output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        output[0, 3, 5] = value  # the first document of each batch
        return output

    def spoiled(*args, **options):
        model = load(*args, **options)
        model.model.layers[3].register_forward_hook(spoil)
        return model

    monkeypatch.setattr(extract, "load_model", spoiled)
    longest = max(rows, key=lambda row: len(row.input_ids))
    name = "NaN" if value != value else "infinity"
    expected = (
        rf"sample {longest.sample_id}: the target's layer 3 gave {name} at token 3, channel 5"
    )
    with pytest.raises(UserError, match=expected):
        run(rows)
    assert list((tmp_path / "features" / "quick").iterdir()) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["tiny_llama", "tiny_qwen3", "tiny_qwen3_next"])
def test_the_targets_logits_follow_from_the_last_hidden_state(
    run, request, identity_of, name, dtype
):
    """Stored before the final norm; through the target's own norm and head it gives its logits."""
    folder = request.getfixturevalue(name)
    rows = {row.sample_id: row for row in some_rows()}
    shard = open_shard(run(list(rows.values()), folder, dtype=dtype, last_hidden=True))
    plain = run(list(rows.values()), folder, dtype=dtype, out=shard.path.with_name("b.zarr"))
    assert shard.attributes["last_hidden"].endswith("before the final norm")
    assert open_shard(plain).attributes["last_hidden"] is None
    identity, compute = identity_of(folder), getattr(torch, dtype)
    norm, head = load_final_norm(identity).to(compute), load_embedding_and_head(identity)[1]
    model = load_model(identity, dtype)
    for i in range(len(shard)):
        document = shard.read(i, last_hidden=True)
        assert np.array_equal(document.hidden, open_shard(plain).read(i).hidden)
        ids = torch.from_numpy(document.input_ids).long()[None]
        with torch.inference_mode():
            want = model(ids).logits[0].float()
        last = torch.from_numpy(document.last_hidden).view(torch.bfloat16)
        got = (norm(last.to(compute)) @ head.to(compute).T).float()
        # what is left is the rounding to bf16, of the state alone or of the whole forward
        assert (got - want).norm() < 0.01 * want.norm(), document.sample_id
        assert (got.argmax(-1) == want.argmax(-1)).float().mean() > 0.95
        after = (last.to(compute) @ head.to(compute).T).float()  # had it been stored after the norm
        assert (after - want).norm() > 0.1 * want.norm()


def test_a_model_that_does_more_than_its_final_norm(run, tmp_path, monkeypatch):
    load = extract.load_model

    def changed(*args, **options):
        model = load(*args, **options)
        model.model.register_forward_hook(doubled)
        return model

    def doubled(module, inputs, out):
        out.last_hidden_state = out.last_hidden_state * 2
        return out

    monkeypatch.setattr(extract, "load_model", changed)
    with pytest.raises(UserError, match="does more than its final norm .*labels: data`"):
        run(some_rows(), last_hidden=True)
    assert not any((tmp_path / "features").rglob("*.*"))  # no shard, no manifest, nothing half done
    run(some_rows())


def test_padding_never_shows(folder):
    rows = some_rows()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with Taps(model, TAPS, torch.bfloat16) as taps:
        one, other = (
            extract.forward(model, taps, rows, pad_id)[0].view(torch.int16).numpy()
            for pad_id in (0, 311)
        )
    assert one.shape == (len(rows), max(LENGTHS), len(TAPS), 64)
    for i, n in enumerate(LENGTHS):
        assert np.array_equal(one[i, :n], other[i, :n])
        assert n == max(LENGTHS) or not np.array_equal(one[i, n:], other[i, n:])


# --- batches --------------------------------------------------------------------------------------


def cut(lengths: list[int], limit: int, edge: int | None = None) -> tuple[list[list[int]], Batches]:
    """The lengths of each batch, and what was counted."""
    rows = sorted(some_rows(lengths), key=lambda row: -len(row.input_ids))
    batches, start, found = Batches(limit, edge), 0, []
    while start < len(rows):
        batch = rows[start : batches.end(rows, start)]
        batches.count(batch)
        start += len(batch)
        found.append([len(row.input_ids) for row in batch])
    assert sum(found, []) == sorted(lengths, reverse=True)
    return found, batches


def test_a_batch_ends_at_its_tokens_at_the_padding_of_all_and_at_the_edge():
    assert cut([10] * 5, limit=30)[0] == [[10] * 3, [10] * 2]
    assert cut([50, 3], limit=30)[0] == [[50], [3]]
    assert cut([100, 90], limit=1000)[0] == [[100, 90]]  # 10 of 200 tokens
    assert cut([100, 89], limit=1000)[0] == [[100], [89]]
    assert cut([100] * 8 + [50, 20], limit=800)[0] == [[100] * 8, [50, 20]]  # 30 of 900
    assert cut([100, 99, 98], limit=1000, edge=98)[0] == [[100, 99], [98]]
    assert cut([100, 99, 98], limit=1000, edge=100)[0] == [[100, 99, 98]]


@pytest.mark.parametrize("seed", range(2))
def test_padding_stays_below_its_share_at_any_moment(seed):
    lengths = np.random.default_rng(seed).lognormal(5, 1, 3000).clip(2, 3000).astype(int).tolist()
    found, batches = cut(lengths, limit=8192)
    assert batches.tokens == sum(len(batch) * batch[0] for batch in found)
    assert batches.padding == batches.tokens - sum(lengths)
    for i in range(len(found)):
        read = sum(len(batch) * batch[0] for batch in found[: i + 1])
        assert read - sum(map(sum, found[: i + 1])) <= 0.05 * read
    assert all(len(batch) == 1 or len(batch) * batch[0] <= 8192 for batch in found)
    assert len(found) < 1.1 * batches.tokens / 8192  # and yet they are nearly full


def test_the_next_batch_and_no_other_is_read_while_one_is_written(tiny_llama, monkeypatch):
    rows, forward = some_rows([20] * 12), extract.forward
    started, written = ([threading.Event() for _ in range(4)] for _ in range(2))

    def noted(*args):
        batch = sum(event.is_set() for event in started)
        started[batch].set()
        assert batch == 0 or written[batch - 1].wait(30)  # this one goes on meanwhile
        return forward(*args)

    monkeypatch.setattr(extract, "forward", noted)
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    with Taps(model, TAPS, torch.bfloat16) as taps:
        found = extract.documents(model, taps, rows, Batches(60))
        for i, document in enumerate(found):
            assert document.sample_id == rows[i].sample_id
            assert i // 3 == 3 or started[i // 3 + 1].wait(30)
            written[i // 3].set()
            assert not any(event.is_set() for event in started[i // 3 + 2 :])


# --- several cards ----------------------------------------------------------------------------------

RANK = """
import os, sys, torch
from dflash import extract
from dflash.errors import entrypoint
if os.environ["RANK"] == sys.argv.pop(1):
    def no_memory(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")
    extract.run_decoder = no_memory
entrypoint(extract.main)
"""


@pytest.fixture
def two_ranks(tmp_path, tiny_qwen3, identity_file) -> Callable:
    """Runs the stage as two processes, of which one may be made to fail; how that ended."""

    def go(rows: list[TokenRow], out: Path, failing: int | str = "none"):
        write_tokens(tmp_path / "tokens.parquet", rows)
        (tmp_path / "rank.py").write_text(RANK)
        machine = {"batch_tokens": 200, "parallel": "tensor", "gpu": 2}
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            *(str(tmp_path / "rank.py"), str(failing), "--settings", json.dumps(SETTINGS)),
            *("--machine", json.dumps(machine), "--identity", str(identity_file(tiny_qwen3))),
            *("--tokens", str(tmp_path / "tokens.parquet"), "--out", str(out)),
        ]
        return subprocess.run(command, capture_output=True, text=True, timeout=300)

    return go


def test_two_ranks_write_what_one_process_writes(run, two_ranks, tiny_qwen3, tmp_path):
    done = two_ranks(some_rows(), tmp_path / "two.zarr")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("8 documents") == 1 and "tokens/s on 2 ranks of cpu" in done.stdout
    one, two = open_shard(run(some_rows(), tiny_qwen3)), open_shard(tmp_path / "two.zarr")
    assert one.sample_ids == two.sample_ids and one.identity == two.identity
    for i in range(len(one)):
        a, b = as_float(one.read(i).hidden), as_float(two.read(i).hidden)
        assert torch.allclose(a, b, rtol=0.01, atol=1e-3)


def test_a_rank_that_fails_ends_all_with_the_cause(two_ranks, tmp_path):
    done = two_ranks(some_rows([20] * 9), tmp_path / "shard" / "two.zarr", failing=1)
    assert done.returncode != 0
    assert "error: extract: out of memory with 180 tokens at once; set `machine" in done.stderr
    assert list((tmp_path / "shard").iterdir()) == []


@pytest.mark.parametrize("parallel", ["device_map", "tensor"])
def test_the_rule_starts_a_process_or_a_process_a_card(tiny_llama, tmp_path, parallel):
    asked = tiny.settings(tmp_path, tiny_llama)
    asked["machine"]["extract"] = {"gpu": 2, "parallel": parallel}
    done = tiny.snakemake(tmp_path, asked, "--dry-run", "--printshellcmds")
    starts = "torchrun --standalone --nproc-per-node=2" if parallel == "tensor" else "python"
    command = f"python -m dflash.launch --gpus 2 --needs 2 -- {starts} -m dflash.extract --settings"
    assert done.stdout.count(command) == 2, done.stdout + done.stderr


def test_gpus_that_would_not_be_used():
    with pytest.raises(UserError, match="gpu 2 with parallel `none`: one GPU would be used; allow"):
        config.check(config.ExtractMachine, {"gpu": 2}, "machine.extract")
    for parallel in ("device_map", "tensor"):
        config.check(config.ExtractMachine, {"gpu": 2, "parallel": parallel}, "machine.extract")


# --- what can go wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "number, words",
    [(errno.EROFS, "the file system is read-only"), (errno.ENOSPC, "the disk is full")],
)
def test_results_folder_that_cannot_be_written(
    run, tmp_path, monkeypatch, capsys, number, words, tiny_llama, identity_file
):
    write_tokens(tmp_path / "tokens.parquet", some_rows())
    out = tmp_path / "out" / "a.zarr"
    mkdir = os.mkdir

    def refuse(path, *args, **kwargs):
        if str(tmp_path / "out") in str(path):
            raise OSError(number, os.strerror(number), str(path))
        return mkdir(path, *args, **kwargs)

    argv = ["extract", "--settings", json.dumps(SETTINGS), "--threads", "1"]
    argv += ["--identity", str(identity_file(tiny_llama)), "--out", str(out)]
    argv += ["--tokens", str(tmp_path / "tokens.parquet")]
    monkeypatch.setattr(os, "mkdir", refuse)
    monkeypatch.setattr("sys.argv", argv)
    with pytest.raises(SystemExit) as e:
        extract.entrypoint(extract.main)
    last = capsys.readouterr().err.splitlines()[-1]
    assert e.value.code == 2 and last.startswith("error: ") and words in last
    assert not (tmp_path / "out").exists()


def test_settings_are_those_of_the_workflow():
    """`config.stage_settings` and this stage agree on the keys."""
    workflow = config.demo_workflow()
    for labels in ("data", "argmax", "soft"):
        training = config.Training(loss=config.Loss(labels=labels))
        drafter = workflow.drafters["demo"].model_copy(update={"training": training})
        asking = workflow.model_copy(update={"drafters": {"demo": drafter}})
        raw = json.loads(config.stage_settings(asking, "extract"))
        settings = config.check(extract.StageSettings, raw, "--settings")
        assert settings.taps and settings.max_tokens == workflow.extract.max_tokens
        assert settings.last_hidden is (labels != "data")
    machine = json.loads(config.machine_settings(workflow, "extract"))
    assert config.check(config.ExtractMachine, machine, "--machine").batch_tokens > 0
