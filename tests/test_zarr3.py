"""Arrays in the Zarr v3 format: exact, readable by others, and never wrong without saying so."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import zarr
from zarr.codecs import BloscCodec, Crc32cCodec

from dflash import zarr3

PIPELINES = ["zarr.core.codec_pipeline.BatchedCodecPipeline", "zarrs.ZarrsCodecPipeline"]
PATTERNS = np.arange(1 << 16, dtype=np.uint16)


@pytest.fixture(params=PIPELINES)
def pipeline(request):
    """zarr-python's own decoders, and those of zarrs."""
    pytest.importorskip(request.param.split(".")[0])
    with zarr.config.set({"codec_pipeline.path": request.param}):
        yield


def write(folder: Path, data: np.ndarray, chunk: int, slab: int, compressed=False, fill=0) -> dict:
    names = (None,) * data.ndim
    metadata = zarr3.metadata(data.shape, data.dtype, chunk, slab, fill, names, compressed)
    folder.mkdir()
    (folder / "zarr.json").write_text(json.dumps(metadata))
    writer = zarr3.ArrayWriter(folder, metadata)
    for start in range(0, len(data), chunk):
        writer.append(data[start : start + chunk])
    writer.finish()
    return metadata


def reader(folder: Path, metadata: dict) -> zarr3.ArrayReader:
    return zarr3.ArrayReader(zarr3.Folder(folder.parent), folder.name, metadata)


@pytest.mark.parametrize("compressed", [False, True])
def test_all_bf16_patterns_survive_here_and_in_other_readers(tmp_path, compressed, pipeline):
    data = np.random.default_rng(0).permutation(PATTERNS).reshape(-1, 4, 16)  # 1024 rows
    metadata = write(tmp_path / "a", data, 100, 300, compressed)
    found = reader(tmp_path / "a", metadata).read(0, len(data))
    assert found.dtype == np.uint16 and np.array_equal(found, data)
    array = zarr.open_array(str(tmp_path / "a"), mode="r")
    assert np.array_equal(array[:], data) and np.array_equal(array[90:310], data[90:310])


@pytest.mark.parametrize("compressed", [False, True])
def test_what_others_write_is_read(tmp_path, compressed, pipeline):
    data = PATTERNS.reshape(-1, 4, 16)
    blosc = BloscCodec(cname="zstd", clevel=1, shuffle="shuffle", typesize=2, blocksize=1 << 20)
    array = zarr.create_array(
        str(tmp_path / "a"),
        shape=data.shape,
        dtype="uint16",
        chunks=(100, 4, 16),
        shards=(300, 4, 16),
        compressors=[blosc, Crc32cCodec()] if compressed else Crc32cCodec(),
        filters=None,
        fill_value=0x7FC1,
        config={"write_empty_chunks": True},
    )
    array[:] = data
    ours = reader(tmp_path / "a", array.metadata.to_dict())
    assert np.array_equal(ours.read(0, len(data)), data)
    assert ours.form.compressed == compressed


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int8", "int32", "int64", "float32"])
@pytest.mark.parametrize("shape", [(1,), (7,), (64,), (65, 3), (200, 1, 2)])
@pytest.mark.parametrize("compressed", [False, True])
def test_every_span_of_every_type(tmp_path, dtype, shape, compressed):
    rng = np.random.default_rng(1)
    data = rng.integers(0, 2 if dtype == "bool" else 100, shape).astype(dtype)
    metadata = write(tmp_path / "a", data, 8, 24, compressed)
    ours = reader(tmp_path / "a", metadata)
    for _ in range(20):
        start, stop = np.sort(rng.integers(0, len(data) + 1, 2))
        assert np.array_equal(ours.read(start, stop), data[start:stop])
    assert np.array_equal(zarr.open_array(str(tmp_path / "a"), mode="r")[:], data)


def test_a_chunk_that_was_never_written_is_an_error_and_not_the_fill_value(tmp_path):
    data = np.ones((20, 4), np.uint16)
    metadata = write(tmp_path / "a", data, 5, 20)
    other = write(tmp_path / "short", data[:10], 5, 20)  # has chunks 2 and 3 marked as absent
    assert other["chunk_grid"] == metadata["chunk_grid"]
    ours = reader(tmp_path / "short", metadata)
    assert np.array_equal(ours.read(3, 10), data[3:10])
    with pytest.raises(zarr3.Damage, match="a chunk is missing"):
        ours.read(9, 11)


@pytest.mark.parametrize("compressed", [False, True])
def test_chunks_of_another_size_are_refused(tmp_path, compressed):
    """Right checksums, but of an array with other chunks."""
    data = np.arange(4000, dtype=np.uint16).reshape(1000, 4)
    metadata = write(tmp_path / "a", data, 500, 1000, compressed)
    write(tmp_path / "b", data[:500], 250, 500, compressed)
    (tmp_path / "a/c/0/0").write_bytes((tmp_path / "b/c/0/0").read_bytes())
    with pytest.raises(zarr3.Damage, match="2000 bytes, expected 4000"):
        reader(tmp_path / "a", metadata).read(0, 1000)


def test_writes_that_take_a_part_are_gone_on_with(tmp_path, monkeypatch):
    class Sluggish(io.FileIO):
        def write(self, data) -> int:
            return super().write(data[:100])

    monkeypatch.setattr(
        zarr3, "open", lambda path, mode, buffering: Sluggish(path, mode), raising=False
    )
    data = PATTERNS.reshape(-1, 4, 16)
    metadata = write(tmp_path / "a", data, 100, 300)
    assert np.array_equal(reader(tmp_path / "a", metadata).read(0, len(data)), data)


def test_compression_takes_no_thread_of_its_own():
    assert zarr3.blosc.use_threads is False
