"""The feature store: exact, whole or absent, and never wrong without saying so."""

from __future__ import annotations

import errno
import io
import json
import multiprocessing
import os
import pickle
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr

from dflash import features, zarr3
from dflash.errors import UserError
from dflash.features import Document, layout, open_shard, verify, write_shard

CODECS = ("raw", "compact", "int8")
T, H = 2, 8
SMALL = dict(chunk_bytes=512, slab_bytes=2048)  # 16 tokens a chunk, 64 a file
IDENTITY = {
    "model": "./target",
    "revision": "local",
    "weights_sha256": "a" * 64,
    "tokenizer_sha256": "b" * 64,
    "chat_template_sha256": "c" * 64,
    "num_hidden_layers": 4,
    "hidden_size": H,
    "tap_convention": features.TAP_CONVENTION,
    "logical_dtype": "bfloat16",
    "taps": [1, 3],
    "last_hidden": None,
    "compute_dtype": "bfloat16",
    "settings_sha256": "d" * 64,
    "tokens_sha256": "e" * 64,
}
FINITE = np.array([b for b in range(1 << 16) if b & 0x7F80 != 0x7F80], np.uint16)


WITH_LAST = IDENTITY | {"last_hidden": features.LAST_HIDDEN}


def with_last(documents: list[Document]) -> list[Document]:
    """The same documents with last hidden states."""
    rng = np.random.default_rng(7)
    return [replace(d, last_hidden=rng.choice(FINITE, (len(d.input_ids), H))) for d in documents]


def some_documents(lengths: list[int], seed: int = 0) -> list[Document]:
    rng = np.random.default_rng(seed)
    return [
        Document(
            f"{rng.integers(1 << 62):016x}",
            rng.integers(0, 300, n).astype(np.int32),
            rng.random(n) < 0.5,
            rng.choice(FINITE, (n, T, H)),
        )
        for n in lengths
    ]


def write(path: Path, documents: list[Document], identity=IDENTITY, **options) -> None:
    tokens = sum(len(d.input_ids) for d in documents)
    with write_shard(path, identity, len(documents), tokens, **(SMALL | options)) as writer:
        for document in documents:
            writer.add(document)


def equal(a: Document, b: Document) -> bool:
    names = ["input_ids", "loss_mask", "hidden", *["last_hidden"] * (b.last_hidden is not None)]
    return a.sample_id == b.sample_id and all(
        x.dtype == y.dtype and np.array_equal(x, y)
        for x, y in ((getattr(a, k), getattr(b, k)) for k in names)
    )


def lifelike_documents(lengths: list[int], taps: int = T, width: int = H) -> list[Document]:
    """Channels of very different size at every token, and a first token with massive activations."""
    rng = np.random.default_rng(3)
    scale = np.exp(rng.normal(0, 1.5, (taps, width)))
    found = []
    for d in some_documents(lengths):
        values = rng.normal(0, 1, (len(d.input_ids), taps, width)) * scale
        values *= np.exp(rng.normal(0, 0.3, (len(values), taps, 1)))
        values[0, :, 3] = 24_000
        found.append(replace(d, hidden=rounded(values)))
    return found


def rounded(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()


def floats(bits: np.ndarray) -> np.ndarray:
    return torch.from_numpy(bits).view(torch.bfloat16).float().numpy()


LENGTHS = [40, 1, 63, 64, 65, 17, 3, 100]


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    return some_documents(LENGTHS)


@pytest.fixture
def path(tmp_path: Path, documents: list[Document]) -> Path:
    path = tmp_path / "00000-of-00001.zarr"
    write(path, documents)
    return path


@pytest.fixture(
    params=["zarr.core.codec_pipeline.BatchedCodecPipeline", "zarrs.ZarrsCodecPipeline"]
)
def pipeline(request) -> Iterator[None]:
    """zarr-python's own decoders, and those of zarrs."""
    pytest.importorskip(request.param.split(".")[0])
    with zarr.config.set({"codec_pipeline.path": request.param}):
        yield


@pytest.fixture(params=CODECS)
def coded(request, tmp_path: Path) -> Path:
    """A shard of each codec, with last hidden states and without."""
    path = tmp_path / f"{request.param}.zarr"
    documents = lifelike_documents(LENGTHS)
    if request.param == "raw":
        write(path, documents)
    else:
        write(path, with_last(documents), WITH_LAST, codec=request.param)
    return path


# --- what is written is what is read ------------------------------------------------------------


def test_round_trip_of_ragged_documents_over_several_files(path, documents):
    shard = open_shard(path, IDENTITY)
    assert len(shard) == len(documents)
    assert shard.sample_ids == [d.sample_id for d in documents]
    assert shard.lengths.dtype == np.int64 and list(shard.lengths) == LENGTHS
    assert list(shard.supervised) == [d.loss_mask.sum() for d in documents]
    assert shard.taps == [1, 3] and shard.identity == IDENTITY
    assert all(equal(shard.read(i), d) for i, d in enumerate(documents))
    assert len(list((path / "hidden" / "c").glob("*/0/0"))) == 6  # files of 353 tokens, 64 each
    ids, mask = shard.tokens()
    assert np.array_equal(ids, np.concatenate([d.input_ids for d in documents]))
    assert np.array_equal(mask, np.concatenate([d.loss_mask for d in documents]))
    assert np.array_equal(shard.loss_mask(4), documents[4].loss_mask)
    with pytest.raises(IndexError):
        shard.read(len(documents))


def test_every_finite_bf16_pattern_survives(tmp_path):
    hidden = np.resize(FINITE, (len(FINITE) // (T * H) + 1, T, H))  # both zeros, subnormals, all
    n = len(hidden)
    document = Document("0" * 16, np.zeros(n, np.int32), np.ones(n, bool), hidden)
    write(tmp_path / "a.zarr", [document], slab_bytes=1 << 15)
    assert equal(open_shard(tmp_path / "a.zarr").read(0), document)


def test_all_other_patterns_are_refused():
    others = sorted(set(range(1 << 16)) - set(FINITE.tolist()))
    assert len(others) == 256 and not features.nonfinite(FINITE)
    assert all(features.nonfinite(np.array([0, b, 1], np.uint16)) for b in others)


def test_some_taps_in_any_order(path, documents):
    shard = open_shard(path)
    assert shard.tap_positions([3]) == [1] and shard.tap_positions([3, 1]) == [1, 0]
    got = shard.read(2, taps=[1]).hidden
    assert got.shape == (63, 1, H) and np.array_equal(got, documents[2].hidden[:, [1]])
    assert np.array_equal(shard.read(2, [1, 0]).hidden, documents[2].hidden[:, ::-1])
    with pytest.raises(UserError, match=r"holds the taps \[1, 3\], but \[2\] are asked for"):
        shard.tap_positions([1, 2])


def test_an_all_false_mask_and_zero_hidden_are_kept(tmp_path):
    """Equal to a fill value of the format: must still be written."""
    n = 70
    document = Document(
        "f" * 16, np.zeros(n, np.int32), np.zeros(n, bool), np.zeros((n, T, H), "u2")
    )
    write(tmp_path / "a.zarr", [document])
    assert equal(open_shard(tmp_path / "a.zarr").read(0), document)
    assert verify(tmp_path / "a.zarr")["supervised_tokens"] == 0


def test_returned_arrays_are_the_callers(path, documents):
    shard = open_shard(path)
    got = shard.read(0)
    got.input_ids[:] = 0
    got.loss_mask[:] = True
    shard.loss_mask(0)[:] = True
    assert equal(shard.read(0), documents[0])


def test_manifest_and_attributes(path, documents):
    manifest = json.loads(path.with_suffix(".json").read_text())
    tokens = sum(LENGTHS)
    supervised = int(sum(d.loss_mask.sum() for d in documents))
    size = sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
    shard = open_shard(path)
    assert manifest == {
        "shard": path.name,
        "documents": len(LENGTHS),
        "tokens": tokens,
        "supervised_tokens": supervised,
        "documents_cut": 0,
        "documents_too_short": 0,
        "documents_without_supervision": 0,
        "taps": [1, 3],
        "hidden_size": H,
        "bytes": size,
        "content_sha256": shard.content_sha256,
        "identity": IDENTITY,
    }
    assert shard.size == size and verify(path) == manifest
    assert set(shard.attributes["versions"]) == {"dflash", "torch", "transformers", "numcodecs"}
    group = zarr.open_group(str(path), mode="r", zarr_format=3)  # any Zarr reader can
    assert group.attrs["model"] == "./target" and group.metadata.consolidated_metadata is None
    assert group["hidden"].fill_value == 0x7FC1 and group["hidden"].shape == (tokens, T, H)


def test_content_hash_depends_on_content_alone(tmp_path, path, documents):
    write(tmp_path / "b.zarr", documents, slab_bytes=1024)
    same = open_shard(tmp_path / "b.zarr").content_sha256
    assert same == open_shard(path).content_sha256
    hidden = documents[5].hidden.copy()
    hidden[3, 1, 2] ^= 1
    d = documents[5]
    changed = [*documents[:5], Document(d.sample_id, d.input_ids, d.loss_mask, hidden)]
    write(tmp_path / "b.zarr", [*changed, *documents[6:]])
    assert open_shard(tmp_path / "b.zarr").content_sha256 != same


# --- codecs ---------------------------------------------------------------------------------------


def test_compact_is_exact_and_smaller(tmp_path):
    given = with_last(lifelike_documents([700, 33, 500], 5, 64))
    identity = WITH_LAST | {"taps": [0, 1, 2, 3, 4], "hidden_size": 64}
    given = [replace(d, last_hidden=d.hidden[:, 2]) for d in given]
    sizes = {}
    for codec in CODECS:
        path = tmp_path / f"{codec}.zarr"
        write(path, given, identity, codec=codec, chunk_bytes=1 << 18, slab_bytes=1 << 19)
        shard = open_shard(path, identity | {"codec": codec})
        sizes[codec] = shard.size
        if codec != "int8":
            assert all(equal(shard.read(i, last_hidden=True), d) for i, d in enumerate(given))
    assert sizes["compact"] < 0.8 * sizes["raw"] and sizes["int8"] < 0.6 * sizes["raw"]
    contents = {open_shard(tmp_path / f"{c}.zarr").content_sha256 for c in ("raw", "compact")}
    assert len(contents) == 1  # the same numbers


def test_int8_is_within_one_percent_and_leaves_the_last_hidden_state_alone(tmp_path):
    given = with_last(lifelike_documents([700, 33, 500, 1], 3, 192))
    given = [replace(d, last_hidden=d.hidden[:, 1]) for d in given]
    identity = WITH_LAST | {"taps": [0, 1, 2], "hidden_size": 192}
    write(tmp_path / "a.zarr", given, identity, codec="int8", chunk_bytes=1 << 18)
    shard = open_shard(tmp_path / "a.zarr")
    errors = []
    for i, d in enumerate(given):
        found = shard.read(i, last_hidden=True)
        assert equal(found, replace(d, hidden=found.hidden))
        exact = floats(d.hidden)
        difference = floats(found.hidden) - exact
        errors.append(np.linalg.norm(difference, axis=2) / np.linalg.norm(exact, axis=2))
    errors = np.concatenate(errors)
    assert (np.sqrt((errors**2).mean(0)) < 0.01).all() and errors.max() < 0.02
    # Whatever part of a document's chunks is read, the numbers are the same.
    assert np.array_equal(shard.read(2, [1]).hidden, shard.read(2).hidden[:, [1]])
    assert np.array_equal(shard._states("hidden", 650, 720)[50:], shard.read(1).hidden[:20])
    verify(tmp_path / "a.zarr")


def test_int8_keeps_extremes_or_refuses_them(tmp_path):
    values = np.zeros((3, T, H))
    values[0], values[1, 0] = floats(np.array([0x7F7F], np.uint16)), 1e-38  # the largest; all zeros
    d = replace(some_documents([3])[0], hidden=rounded(values))
    write(tmp_path / "a.zarr", [d], codec="int8")
    assert np.array_equal(open_shard(tmp_path / "a.zarr").read(0).hidden[[0, 2]], d.hidden[[0, 2]])
    values[0], values[1] = 1e38, [1, 100, *[0] * (H - 2)]
    values[2], values[2, :, 1] = 0.6 * 3.38e38, 3.38e38  # 67.56 steps would become 68
    d = replace(d, hidden=rounded(values[1:]), input_ids=d.input_ids[1:], loss_mask=d.loss_mask[1:])
    with pytest.raises(UserError, match="largest bf16 number, .* set `extract.codec: compact`"):
        write(tmp_path / "b.zarr", [d], codec="int8")


def test_another_codec_is_another_store(coded):
    codec = coded.stem
    open_shard(coded, {"codec": codec})
    with pytest.raises(UserError, match=f"codec is '{codec}' here, 'other' is asked for"):
        open_shard(coded, {"codec": "other"})


def test_other_readers_of_zarr_see_the_same(coded, pipeline):
    group = zarr.open_group(str(coded), mode="r", zarr_format=3)
    shard = open_shard(coded)
    names = set(shard.attributes["arrays_sha256"])
    assert set(group.array_keys()) == names and {"hidden", "offsets"} < names
    for name in names:
        assert np.array_equal(group[name][:], shard._rows(name)), name
        assert group[name].dtype == shard._rows(name).dtype


def test_shards_of_the_first_program_stay_readable():
    """Written with zarr-python 3.1.6 by the version before codecs; small arrays are one object."""
    path = Path(__file__).parent / "golden" / "features-1.zarr"
    given = with_last(some_documents([40, 1, 63, 24]))
    shard = open_shard(path, WITH_LAST)
    assert all(equal(shard.read(i, last_hidden=True), d) for i, d in enumerate(given))
    assert verify(path)["content_sha256"] == shard.content_sha256


# --- layout ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "taps, width, chunk", [(5, 576, 128), (5, 4096, 32), (1, 8192, 64), (1, 64, 8192)]
)
def test_layout_of_real_widths(taps, width, chunk):
    assert layout(10**8, 2 * taps * width)[0] == chunk


@pytest.mark.parametrize("codec", CODECS)
def test_chunks_and_files_of_every_width_are_neither_small_nor_large(codec):
    for width in (64, 576, 1024, 2048, 2880, 4096, 5120, 8192):
        for taps in range(1, 9):
            row = 2 * taps * width
            chunk, slab = layout(10**8, row, features.CHUNK_BYTES[codec])
            assert features.CHUNK_BYTES[codec] / 2 < chunk * row <= features.CHUNK_BYTES[codec]
            assert slab % chunk == 0 and 300 << 20 < slab * row <= 320 << 20


def test_layout_of_few_tokens():
    assert layout(10, 32) == (10, 10)
    assert layout(456 * 128, 5760) == (128, 228 * 128)  # two files of 228, not 455 and 1
    assert layout(7, 10**9) == (1, 1)


# --- the last hidden state -----------------------------------------------------------------------


def test_the_last_hidden_state_comes_along_if_asked_for(tmp_path, path, documents):
    given = with_last(documents)
    write(tmp_path / "last.zarr", given, WITH_LAST)
    shard, plain = open_shard(tmp_path / "last.zarr", WITH_LAST), open_shard(path)
    for i, d in enumerate(given):
        got = shard.read(i, [1], last_hidden=True)
        assert got.last_hidden.dtype == np.uint16 and np.array_equal(got.last_hidden, d.last_hidden)
        assert np.array_equal(got.hidden, d.hidden[:, [1]])
        assert shard.read(i).last_hidden is None and equal(shard.read(i), documents[i])
    assert len(list((shard.path / "last_hidden" / "c").glob("*/0"))) == 6  # as many as of hidden
    assert verify(shard.path)["identity"]["last_hidden"] == features.LAST_HIDDEN
    assert shard.content_sha256 != plain.content_sha256 and shard.size > plain.size
    assert not (path / "last_hidden").exists()  # nothing is stored that nobody needs


def test_a_shard_without_the_last_hidden_state_is_refused(path):
    expected = (
        r"^[^\n]*00000-of-00001.zarr: holds no last hidden state, but `training.loss.labels` other than "
        r"`data` needs .* before its final norm; run extract again with this drafter in the settings$"
    )
    shard = open_shard(path)
    for ask in (shard.require_last_hidden, lambda: shard.read(0, last_hidden=True)):
        with pytest.raises(UserError, match=expected):
            ask()


def test_a_state_on_the_other_side_of_the_norm_is_refused(tmp_path, documents):
    after = IDENTITY | {"last_hidden": "output of the last decoder layer, after the final norm"}
    write(tmp_path / "a.zarr", with_last(documents), after)
    with pytest.raises(UserError, match="holds 'output of .* after the final norm', but"):
        open_shard(tmp_path / "a.zarr").require_last_hidden()


def test_damage_to_the_last_hidden_state_is_noticed(tmp_path, documents):
    path = tmp_path / "a.zarr"
    write(path, with_last(documents), WITH_LAST)
    shard, file = open_shard(path), path / "last_hidden" / "c" / "5" / "0"
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"document 7.*: last_hidden: a checksum is wrong"):
        shard.read(7, last_hidden=True)
    assert equal(shard.read(7), documents[7])
    with pytest.raises(UserError, match="last_hidden: a checksum is wrong"):
        verify(path)
    file.unlink()
    with pytest.raises(UserError, match="last_hidden/c/5/0 is missing"):
        shard.read(7, last_hidden=True)
    with pytest.raises(UserError, match="missing"):
        open_shard(path)
    write(path, with_last(documents), WITH_LAST)
    other = tmp_path / "b.zarr" / "last_hidden/c/1/0"  # whole in itself, but of another shard
    changed = [replace(d, last_hidden=d.last_hidden ^ 1) for d in with_last(documents)]
    write(tmp_path / "b.zarr", changed, WITH_LAST)
    shutil.copy(other, path / "last_hidden/c/1/0")
    with pytest.raises(UserError, match="content_sha256"):
        verify(path)


def test_last_hidden_states_of_the_wrong_form(tmp_path, documents):
    good = with_last(documents)
    last = good[3].last_hidden.copy()
    last[50, 6] = 0xFF80
    bad = replace(good[3], last_hidden=last)
    words = f"sample {bad.sample_id}: the target's last layer gave infinity at token 50, channel 6"
    with pytest.raises(UserError, match=words):
        write(tmp_path / "a.zarr", [*good[:3], bad], WITH_LAST)
    with pytest.raises(ValueError, match="last_hidden is absent, expected uint16"):
        write(tmp_path / "a.zarr", documents, WITH_LAST)
    with pytest.raises(ValueError, match="last_hidden is uint16 .*expected"):
        write(tmp_path / "a.zarr", [replace(good[0], last_hidden=last)], WITH_LAST)
    with pytest.raises(ValueError, match="last_hidden is given, but not announced"):
        write(tmp_path / "a.zarr", good)
    assert list(tmp_path.iterdir()) == []


# --- wrong documents ----------------------------------------------------------------------------


@pytest.mark.parametrize("bits, name", [(0x7FC1, "NaN"), (0xFF80, "infinity"), (0x7F81, "NaN")])
def test_nonfinite_is_refused_with_its_sample(tmp_path, documents, bits, name):
    hidden = documents[3].hidden.copy()
    hidden[50, 1, 6] = bits
    d = documents[3]
    bad = Document(d.sample_id, d.input_ids, d.loss_mask, hidden)
    expected = rf"sample {d.sample_id}: the target's layer 3 gave {name} at token 50, channel 6"
    with pytest.raises(UserError, match=expected):
        write(tmp_path / "a.zarr", [*documents[:3], bad])
    assert list(tmp_path.iterdir()) == []


def test_totals_must_match(tmp_path, documents):
    total = sum(LENGTHS)
    for n, tokens in ((8, total + 1), (9, total)):
        with pytest.raises(ValueError, match="announced"):
            with write_shard(tmp_path / "a.zarr", IDENTITY, n, tokens, **SMALL) as writer:
                for d in documents:
                    writer.add(d)
    for n, tokens in ((8, total - 1), (7, total)):
        with pytest.raises(ValueError, match="more than"):
            with write_shard(tmp_path / "a.zarr", IDENTITY, n, tokens, **SMALL) as writer:
                for d in documents:
                    writer.add(d)
    assert list(tmp_path.iterdir()) == []


def test_documents_of_the_wrong_form(tmp_path, documents):
    d = documents[0]
    wrong = {
        "twice": d,
        "16 hexadecimal": Document("x" * 16, d.input_ids, d.loss_mask, d.hidden),
        "differ in length": Document("1" * 16, d.input_ids, d.loss_mask[:-1], d.hidden),
        "expected uint16": Document("1" * 16, d.input_ids, d.loss_mask, d.hidden.view(np.int16)),
        "hidden is": Document("1" * 16, d.input_ids, d.loss_mask, d.hidden[:, :1]),
    }
    for words, document in wrong.items():
        with pytest.raises(ValueError, match=words):
            with write_shard(tmp_path / "a.zarr", IDENTITY, 2, 80, **SMALL) as writer:
                writer.add(d)
                writer.add(document)


# --- another shard than the one asked for ---------------------------------------------------------


@pytest.mark.parametrize("field", list(IDENTITY))
def test_each_identity_field_is_compared(path, field):
    wrong = {"taps": [1, 2], "last_hidden": "before the final norm"}.get(field, "other")
    with pytest.raises(UserError) as e:
        open_shard(path, IDENTITY | {field: wrong})
    assert f"{field} is {IDENTITY[field]!r} here, {wrong!r} is asked for" in str(e.value)
    others = [f for f in IDENTITY if f != field]
    assert not any(f"{f} is " in str(e.value) for f in others)


def test_every_differing_field_is_named_and_unknown_ones_too(path):
    with pytest.raises(UserError, match=r"colour is 'not recorded' .*; model is .*; revision is "):
        open_shard(path, IDENTITY | {"model": "x", "revision": "y", "colour": "red"})


def change_attributes(path: Path, **changes) -> None:
    """What another version of the program might have written: the hash is right."""
    group = json.loads((path / "zarr.json").read_text())
    attributes = group["attributes"] | changes
    del attributes["attributes_sha256"]
    digest = features.text_sha256(features.canonical(attributes))
    group["attributes"] = attributes | {"attributes_sha256": digest}
    (path / "zarr.json").write_text(json.dumps(group))


def test_other_formats_and_versions(path, tmp_path):
    change_attributes(path, format_version=2)
    with pytest.raises(UserError, match="format version 2, codec 'raw'; this program reads vers"):
        open_shard(path)
    change_attributes(path, format_version=1, codec="gzip")
    with pytest.raises(UserError, match="codec 'gzip'; .* codecs raw, compact, int8: run extract"):
        open_shard(path)
    change_attributes(path, format="pictures")
    with pytest.raises(UserError, match="not a dflash-features folder"):
        open_shard(path)
    with pytest.raises(UserError, match="no such shard; run the extract stage"):
        open_shard(tmp_path / "none.zarr")
    (tmp_path / "empty.zarr").mkdir()
    with pytest.raises(UserError, match="zarr.json is missing"):
        open_shard(tmp_path / "empty.zarr")


def test_manifest_of_another_shard(path, tmp_path, documents):
    write(tmp_path / "b.zarr", documents[:3])
    shutil.copy(tmp_path / "b.json", path.with_suffix(".json"))
    with pytest.raises(
        UserError, match="differs from its manifest .*in bytes, content_sha256, doc"
    ):
        open_shard(path)
    path.with_suffix(".json").write_text("[1]")
    with pytest.raises(UserError, match="differs from its manifest"):
        open_shard(path)
    for text in ("{", "[" * 100_000):
        path.with_suffix(".json").write_text(text)
        with pytest.raises(UserError, match="not JSON"):
            open_shard(path)
    path.with_suffix(".json").unlink()
    with pytest.raises(UserError, match=r"its manifest .*00000-of-00001.json is missing; run the"):
        open_shard(path, manifest=path.with_suffix(".json"))
    assert len(open_shard(path)) == 8


def test_what_is_no_shard_is_not_to_be_deleted(path, tmp_path, capsys):
    for given, words in (
        (tmp_path, "not a shard .*; give the path of a SHARD.zarr"),
        (path.with_suffix(".json"), "is a file; give a shard"),
        (path / "zarr.json", "is a file; give a shard"),
    ):
        for command in ("inspect", "verify"):
            with pytest.raises(UserError, match=rf"^{given}: {words}") as e:
                features.main([command, str(given)])
            assert "delete" not in str(e.value)


def test_a_renamed_shard_is_whole(path, tmp_path):
    renamed = tmp_path / "b.zarr"
    path.rename(renamed)
    path.with_suffix(".json").rename(renamed.with_suffix(".json"))
    with pytest.raises(
        UserError, match="in shard .'00000-of-00001.zarr' there, 'b.zarr' here.; .* verify"
    ):
        open_shard(renamed)
    with pytest.raises(UserError, match="whole, but differs .* in shard .*the manifest alone"):
        verify(renamed)
    renamed.with_suffix(".json").unlink()
    verify(renamed)
    os.truncate(renamed / "hidden/c/0/0/0", 99)
    with pytest.raises(UserError, match="damaged: .*delete this folder"):
        verify(renamed)


def test_another_size_than_the_manifest_says_is_looked_into(path):
    manifest = path.with_suffix(".json")
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"bytes": 5}))
    with pytest.raises(
        UserError, match="in bytes .5 there, .* here.; .* verify .* tells whether it is dam"
    ):
        open_shard(path)
    with pytest.raises(UserError, match="whole, but"):
        verify(path)
    os.truncate(path / "hidden/c/0/0/0", 99)
    with pytest.raises(UserError, match="delete this folder"):
        verify(path)


def test_strange_files_do_no_harm(path):
    for folder in (path, path / "hidden", path / "hidden/c"):
        (folder / ".DS_Store").write_bytes(b"12345")
    assert open_shard(path).size == verify(path)["bytes"]


def test_a_shard_is_opened_and_written_from_within(path, documents, monkeypatch, capsys):
    monkeypatch.chdir(path)
    features.main(["inspect", "."])
    features.main(["verify", "."])
    assert ".: fine: 8 documents" in capsys.readouterr().out
    write(Path(), documents[:3])
    assert len(open_shard(path)) == 3
    assert {p.name for p in path.parent.iterdir()} == {path.name, f"{path.stem}.json"}


def test_counts_that_contradict_the_arrays(path):
    counts = open_shard(path).counts
    path.with_suffix(".json").unlink()
    change_attributes(path, counts=counts | {"tokens": counts["tokens"] - 1})
    with pytest.raises(UserError, match="the counts say"):
        open_shard(path)
    change_attributes(path, counts=counts | {"supervised_tokens": 1})
    with pytest.raises(UserError, match="loss_mask marks"):
        open_shard(path).read(0)


# --- damage ---------------------------------------------------------------------------------------


def files_of(path: Path) -> list[Path]:
    return sorted(f for f in path.rglob("*") if f.is_file())


def read_all(path: Path) -> tuple:
    shard = open_shard(path)
    last = shard.identity["last_hidden"] is not None
    documents = [shard.read(i, last_hidden=last) for i in range(len(shard))]
    return shard.identity, shard.counts, shard.content_sha256, documents


def same(a: tuple, b: tuple) -> bool:
    return a[:3] == b[:3] and len(a[3]) == len(b[3]) and all(map(equal, a[3], b[3]))


@pytest.mark.parametrize("with_manifest", [True, False])
def test_every_missing_file_is_noticed_when_opening(coded, with_manifest):
    path = coded
    if not with_manifest:
        path.with_suffix(".json").unlink()
    for file in files_of(path):
        content = file.read_bytes()
        file.unlink()
        with pytest.raises(UserError, match="missing.*; delete this folder and run extract again"):
            open_shard(path)
        file.write_bytes(content)
    open_shard(path)


@pytest.mark.parametrize("with_manifest", [True, False])
def test_every_truncated_file_is_noticed(coded, with_manifest):
    path = coded
    if not with_manifest:
        path.with_suffix(".json").unlink()
    for file in files_of(path):
        content = file.read_bytes()
        for size in (0, 1, len(content) // 2, len(content) - 1):
            file.write_bytes(content[:size])
            if file.name == "zarr.json" and size == len(content) - 1 and not with_manifest:
                continue  # only white space at the end
            with pytest.raises(UserError):
                open_shard(path) if with_manifest else read_all(path)
        file.write_bytes(content)
    read_all(path)


@pytest.mark.parametrize("with_manifest", [True, False])
def test_flipped_bits_are_caught_or_harmless(coded, with_manifest):
    path = coded
    original = read_all(path)
    rng = np.random.default_rng(1)
    flips = caught = 0
    manifest = path.with_suffix(".json")
    if not with_manifest:
        manifest.unlink()
    for file in [*files_of(path), *[manifest] * with_manifest]:
        content = file.read_bytes()
        group = file == path / "zarr.json"  # the identity
        for bit in rng.integers(0, 8 * len(content), 30 if group else 12):
            damaged = bytearray(content)
            damaged[bit // 8] ^= 1 << bit % 8
            file.write_bytes(damaged)
            try:
                assert same(read_all(path), original), f"{file}: wrong data without an error"
            except UserError as e:
                assert str(path.parent) in str(e)
                caught += 1
            flips += 1
            file.write_bytes(content)
    assert flips > 200 and caught > 0.95 * flips and same(read_all(path), original)


def test_a_chunk_that_vanishes_after_opening(path):
    shard = open_shard(path)
    shutil.rmtree(path / "hidden" / "c" / "2")
    shard.read(0)
    name = shard.sample_ids[4]
    expected = rf"document 4 \(sample {name}\): hidden/c/2/0/0 is missing; delete this folder"
    with pytest.raises(UserError, match=expected):
        shard.read(4)


def test_a_flipped_bit_names_the_document(path):
    shard = open_shard(path)
    file = path / "hidden" / "c" / "5" / "0" / "0"  # the last tokens
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"document 7.*: hidden: a checksum is wrong; delete this"):
        shard.read(7)
    with pytest.raises(UserError, match="document 7.*checksum"):
        verify(path)


def test_objects_of_two_shards_mixed_up(tmp_path, path, documents):
    """Each has a right checksum; only reading everything can tell."""
    write(tmp_path / "b.zarr", some_documents(LENGTHS, seed=9))
    shutil.copy(tmp_path / "b.zarr" / "hidden/c/1/0/0", path / "hidden/c/1/0/0")
    with pytest.raises(UserError, match="content_sha256"):
        verify(path)


@pytest.mark.parametrize(
    "number, words", [(errno.EIO, "run extract again"), (errno.EMFILE, "ulimit -n")]
)
def test_read_errors_have_their_remedy(path, monkeypatch, number, words):
    shard = open_shard(path)
    shard.read(0)

    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("os.preadv", fail)
    with pytest.raises(UserError, match=words) as e:
        shard.read(0)
    assert str(path) in str(e.value)


# --- writers that die or meet ---------------------------------------------------------------------

KILLED_WRITERS = """
import os, signal, sys
from pathlib import Path
import numpy as np
sys.path.insert(0, {tests!r})
from dflash import files, zarr3
from test_features import CODECS, LENGTHS, WITH_LAST, lifelike_documents, with_last, write

# A moment is a file operation on the shard (an audit event) or a place within written data.
folder, path = sys.argv[1], Path(sys.argv[1]) / "a.zarr"
moments, last = 0, 0
def moment():
    global moments
    moments += 1
    if moments == last:
        os.kill(os.getpid(), signal.SIGKILL)
def hook(event, args):
    if event.startswith(("open", "os.", "shutil.")) and any(folder in str(a) for a in args[:2]):
        moment()
sys.addaudithook(hook)
write_whole = zarr3.ArrayWriter._write
def in_halves(self, data):
    moment()
    self.file.write(bytes(data)[: len(data) // 2])
    self.file.flush()
    moment()
    self.file.seek(-(len(data) // 2), 1)
    write_whole(self, data)
zarr3.ArrayWriter._write = in_halves
files._fsync = lambda path: None  # a kill loses nothing that was handed to the system
documents = with_last(lifelike_documents(LENGTHS))
rng = np.random.default_rng(0)
for codec in CODECS:
    counting = os.pipe()
    for kill in [0, *range(7), 0]:
        child = os.fork()
        if child == 0:
            moments, last = 0, int(rng.integers(1, total)) if kill else 0
            write(path, documents, WITH_LAST, codec=codec)
            os.write(counting[1], moments.to_bytes(8, "little"))
            os._exit(0)
        rng.random()  # another moment for the next child
        status = os.waitpid(child, 0)[1]
        if status == 0:
            total = int.from_bytes(os.read(counting[0], 8), "little")
        print(codec, status, flush=True)
        sys.stdin.readline()  # the test looks at what is there
"""


@pytest.mark.parametrize("old", [False, True])
def test_killed_writers_leave_a_whole_shard_or_none(tmp_path, documents, old, monkeypatch):
    monkeypatch.setattr("dflash.files._fsync", lambda path: None)
    path = tmp_path / "a.zarr"
    fresh = with_last(lifelike_documents(LENGTHS))
    contents, old_content = {}, None
    if old:
        write(path, documents)
        old_content = read_all(path)
    for codec in CODECS:
        write(tmp_path / codec / "a.zarr", fresh, WITH_LAST, codec=codec)
        contents[codec] = read_all(tmp_path / codec / "a.zarr")
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            KILLED_WRITERS.format(tests=str(Path(__file__).parent)),
            str(tmp_path),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    killed, seen = 0, {"old": 0, "new": 0, "absent": 0}
    with process:
        for line in process.stdout:
            codec, status = line.split()
            killed += status != "0"
            if path.exists():
                verify(path)
                found = read_all(path)
                assert same(found, contents[codec]) or (old and same(found, old_content)), line
                seen["new" if same(found, contents[codec]) else "old"] += 1
            else:
                seen["absent"] += 1
            if old:
                write(path, documents)
            else:
                shutil.rmtree(path, ignore_errors=True)
                path.with_suffix(".json").unlink(missing_ok=True)
            process.stdin.write("\n")
            process.stdin.flush()
    assert process.returncode == 0 and killed >= 18
    assert seen["new"] >= 6 and seen["old" if old else "absent"] > 10
    # The last writer was not killed; it removed what all others had left.
    assert {p.name for p in tmp_path.iterdir()} <= {"a.zarr", "a.json", *CODECS}


def test_a_second_writer_is_refused(tmp_path, documents):
    path = tmp_path / "a.zarr"
    with write_shard(path, IDENTITY, 1, 40, **SMALL) as writer:
        with pytest.raises(UserError, match="another process is writing this shard"):
            write(path, documents)
        process = subprocess.run(
            [
                sys.executable,
                "-c",
                "import sys; from pathlib import Path; from dflash.features import exclusive\n"
                "with exclusive(Path(sys.argv[1])): pass",
                str(path),
            ],
            capture_output=True,
            text=True,
        )
        assert "another process is writing this shard" in process.stderr
        writer.add(documents[0])
    assert len(open_shard(path)) == 1
    assert {p.name for p in tmp_path.iterdir()} == {"a.zarr", "a.json"}  # no lock file stays
    write(path, documents)
    assert len(open_shard(path)) == 8


def everything(folder: Path) -> dict[Path, bytes]:
    return {f: f.read_bytes() for f in folder.rglob("*") if f.is_file()}


@pytest.mark.parametrize("free", [0, 700, 3000])
def test_full_disk_leaves_the_good_shard_alone(tmp_path, coded, monkeypatch, free):
    documents = lifelike_documents(LENGTHS)
    before = everything(tmp_path)
    left = free

    class Disk(io.FileIO):
        """Takes what fits of a write; the next one fails."""

        def write(self, data) -> int:
            nonlocal left
            if left == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            taken = min(left, len(data))
            left -= taken
            return super().write(data[:taken])

    monkeypatch.setattr(
        zarr3, "open", lambda path, mode, buffering: Disk(path, mode), raising=False
    )
    for path in (coded, tmp_path / "b.zarr"):
        left = free
        with pytest.raises(UserError, match=rf"{path.name}: the disk is full: free space"):
            write(path, documents, codec=coded.stem)
    monkeypatch.undo()
    assert everything(tmp_path) == before
    verify(coded)


@pytest.mark.parametrize("call", ["fsync", "rename"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_failure_at_the_very_end_leaves_the_good_shard_alone(
    path, tmp_path, documents, monkeypatch, call, number
):
    before, real = everything(tmp_path), getattr(os, call)

    def fail(*args):
        if call == "fsync" or args[1] == path and ".old." not in args[0].name:
            raise OSError(number, os.strerror(number))
        return real(*args)

    with monkeypatch.context() as m:
        m.setattr(os, call, fail)
        with pytest.raises(UserError, match=rf"^{path}: the disk .*: free space"):
            write(path, documents[:3])
    assert everything(tmp_path) == before
    verify(path)
    write(path, documents[:3])
    assert len(open_shard(path)) == 3


def test_a_manifest_that_cannot_be_written_names_its_shard(path, documents, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(features, "write_json", fail)
    with pytest.raises(UserError, match=rf"^{path}: the disk is full"):
        write(path, documents[:3])
    # The older manifest does not speak for the new shard.
    assert not path.with_suffix(".json").exists() and verify(path)["documents"] == 3


def test_errors_of_the_caller_stay_what_they_are(tmp_path):
    with pytest.raises(OSError, match="no such model"):
        with write_shard(tmp_path / "a.zarr", IDENTITY, 1, 1):
            raise OSError("no such model")


def test_a_link_to_a_shard_is_replaced_and_what_it_leads_to_stays(path, tmp_path, documents):
    link = tmp_path / "link.zarr"
    link.symlink_to(path)
    # A writer that was killed left links, one of them to nothing.
    for name, to in (
        (".link.zarr.old.99999999.partial", path),
        (".link.zarr.99999998.partial", "no"),
    ):
        (tmp_path / name).symlink_to(to)
    for number in (3, 2):
        write(link, documents[:number])
        assert not link.is_symlink() and len(open_shard(link)) == number
        assert len(open_shard(path)) == 8
    link.with_suffix(".json").unlink()
    shutil.rmtree(link)
    link.symlink_to(tmp_path / "nothing")
    write(link, documents[:3])
    assert len(open_shard(link)) == 3
    assert not list(tmp_path.glob(".*"))


def test_an_old_shard_that_cannot_be_removed_yet_goes_with_the_next_write(
    path, tmp_path, documents, monkeypatch
):
    with monkeypatch.context() as m:
        m.setattr(os, "rmdir", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.EBUSY, "busy")))
        write(path, documents[:3])
        assert len(open_shard(path)) == 3 and list(tmp_path.glob(".*.old.*.partial"))
    write(path, documents[:2])
    assert len(open_shard(path)) == 2 and not list(tmp_path.glob(".*"))


def test_a_limit_of_file_size_leaves_the_good_shard_alone(tmp_path, coded):
    documents = lifelike_documents(LENGTHS)
    before = everything(tmp_path)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(UserError, match=rf"{coded.name}: File too large"):
            write(coded, documents, codec=coded.stem)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert everything(tmp_path) == before


def test_too_few_open_files_are_told_and_do_no_harm(path, documents):
    shard = open_shard(path)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    taken = os.open(path, os.O_RDONLY)
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken + 2, hard))
    expected = "00000-of-00001.zarr: too many open files: raise the limit"
    try:
        for action in (
            lambda: open_shard(path),
            lambda: shard.read(0),
            lambda: write(path, documents),
        ):
            with pytest.raises(UserError, match=expected):
                holding = [os.open(path, os.O_RDONLY)]
                try:
                    action()
                finally:
                    os.close(holding[0])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(taken)
    assert equal(shard.read(0), documents[0])


@contextmanager
def without_privileges() -> Iterator[None]:
    """Run as somebody whom modes of files bind, which they do not bind root."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_folders_and_files_without_permission(documents):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        path = folder / "a.zarr"
        write(path, documents)
        before = everything(folder)
        shard = open_shard(path)
        folder.chmod(0o555)
        file = path / "hidden/c/2/0/0"
        file.chmod(0)
        try:
            with without_privileges():
                for target in (path, folder / "b.zarr", folder / "new" / "a.zarr"):
                    with pytest.raises(UserError, match=rf"{target.name}: no permission: make the"):
                        write(target, documents)
                assert equal(shard.read(0), documents[0])
                expected = "a.zarr: no permission to read hidden/c/2/0/0: change its mode"
                with pytest.raises(UserError, match=expected):
                    shard.read(4)
        finally:
            file.chmod(0o644)
            folder.chmod(0o755)
        assert everything(folder) == before


def test_failing_caller_leaves_nothing(tmp_path, documents):
    with pytest.raises(ZeroDivisionError):
        with write_shard(tmp_path / "a.zarr", IDENTITY, 2, 80, **SMALL) as writer:
            writer.add(documents[0])
            assert writer.arrays["hidden"].file
            raise ZeroDivisionError
    assert not any(array.file for array in writer.arrays.values())
    assert list(tmp_path.iterdir()) == []


# --- other processes ------------------------------------------------------------------------------


def _read_one(shard: features.Shard, i: int) -> Document:
    return shard.read(i)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_shards_travel_to_workers(path, documents, method):
    shard = open_shard(path)
    shard.read(0)  # opened here already: the worker must open its own
    with multiprocessing.get_context(method).Pool(1) as pool:
        for i in (2, 7):
            assert equal(pool.apply(_read_one, (shard, i)), documents[i])


def test_pickle_and_close_keep_no_arrays(path, documents):
    shard = open_shard(path)
    shard.read(7)
    assert len(pickle.dumps(shard)) < 4000
    shard.close()
    assert set(shard.__dict__) == set(shard.__getstate__())
    assert equal(shard.read(7), documents[7])


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_open_shards_hold_one_descriptor_once_read_and_none_when_closed(coded):
    before = open_descriptors()
    shards = [open_shard(coded) for _ in range(20)]
    assert open_descriptors() == before and "offsets" not in shards[0].__dict__
    for shard in shards:
        shard.read(3)
        shard.read(7)
    assert open_descriptors() == before + 20
    for shard in shards:
        shard.close()
    assert open_descriptors() == before
    shards[0].read(3)
    del shards, shard
    assert open_descriptors() == before


def test_a_shard_replaced_while_open_is_not_mixed_with_the_new_one(path, documents):
    held, closed = open_shard(path), open_shard(path)
    assert equal(held.read(0), documents[0])
    write(path, some_documents(LENGTHS, seed=9))
    for shard in (held, closed):
        with pytest.raises(UserError, match="was removed or replaced since it was opened; start"):
            shard.read(1)
    shutil.rmtree(path)
    for shard in (held, closed):
        with pytest.raises(UserError, match="00000-of-00001.zarr: .*removed|the folder is missing"):
            shard.read(1)


def test_a_document_is_read_without_the_tokens_of_the_others(path, documents, monkeypatch):
    monkeypatch.setattr(features, "FLAT_CHUNK", 32)
    write(path, documents)
    shard = open_shard(path)
    asked = []
    chunk = zarr3.ArrayReader._chunk

    def spy(self, *args):
        asked.append(self.name)
        chunk(self, *args)

    monkeypatch.setattr(zarr3.ArrayReader, "_chunk", spy)
    assert all(equal(shard.read(i), d) for i, d in enumerate(documents))
    asked.clear()
    shard.read(1)
    assert asked.count("input_ids") == asked.count("loss_mask") == 1  # of 12 chunks
    assert not {"_input_ids", "_loss_mask"} & set(shard.__dict__)
    ids, mask = shard.tokens()
    assert np.array_equal(ids, np.concatenate([d.input_ids for d in documents]))
    asked.clear()
    assert equal(shard.read(4), documents[4]) and "input_ids" not in asked
    file = path / "input_ids" / "c" / "0"
    content = bytearray(file.read_bytes())
    content[-60] ^= 1  # in the index
    file.write_bytes(content)
    shard.close()
    with pytest.raises(UserError, match=r"document 1 .*input_ids: a checksum is wrong"):
        shard.read(1)


# --- command line ---------------------------------------------------------------------------------


def test_command_line(tmp_path, path, documents, capsys):
    features.main(["inspect", str(path)])
    shown = capsys.readouterr().out
    for words in ("weights_sha256", "a" * 64, "supervised_tokens", "MB in", "16, 64"):
        assert words in shown
    write(tmp_path / "b.zarr", documents[:3])
    features.main(["verify", str(path), str(tmp_path / "b.zarr")])
    assert capsys.readouterr().out.count(": fine: ") == 2
    (path / "offsets" / "c" / "0").write_bytes(b"")
    path.with_suffix(".json").unlink()
    with pytest.raises(UserError, match="1 of 2 shards are not fine"):
        features.main(["verify", str(path), str(tmp_path / "b.zarr")])
    with pytest.raises(UserError, match="offsets.*delete this folder"):
        features.main(["verify", str(path)])


def test_exit_status(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["features", "verify", str(tmp_path / "none.zarr")])
    with pytest.raises(SystemExit) as e:
        features.entrypoint(features.main)
    assert e.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
