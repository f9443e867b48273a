"""Zarr v3 arrays cut along their first axis only: written as a stream, read in spans of rows.

    NAME/zarr.json   shape, type, chunks and codecs
    NAME/c/K/0/0     chunks one after the other, then the index: where each of them is

A chunk is the least that is read, a file holds many (Zarr's sharding codec), and each chunk and each
index ends in its crc32c. Any Zarr v3 reader opens such arrays. This one is ours because a general
reader takes several times the CPU time for the one access we need (benchmarks/features.py), and
because what is damaged or missing here is always an error and never a fill value.

Nothing is cached but indices, no thread is started and no file stays open.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import google_crc32c
import numpy as np
from numcodecs import blosc

# Long blocks, within which the two bytes of bf16 values are shuffled apart: these take 0.70 of the bytes
# where blosc's own block size takes 0.81.
BLOSC = {"cname": "zstd", "clevel": 1, "shuffle": "shuffle", "blocksize": 1 << 20}
CRC_BYTES = 4
INDEX_ENTRY = np.dtype([("offset", "<u8"), ("size", "<u8")])
ABSENT = (1 << 64) - 1  # offset and size of a chunk that was never written

# Without its own pool blosc takes no thread beyond the caller's, and several may call it at once.
blosc.use_threads = False


class Damage(ValueError):
    """What is stored is not what was written."""


def metadata(
    shape: Sequence[int],
    dtype: np.dtype,
    chunk: int,
    slab: int,
    fill_value: Any,
    names: Sequence[str | None],
    compressed: bool = False,
) -> dict[str, Any]:
    """The content of zarr.json: `chunk` and `slab` are the rows of a chunk and of a file."""
    little = {"configuration": {"endian": "little"}} if dtype.itemsize > 1 else {}
    codecs: list[dict[str, Any]] = [{"name": "bytes", **little}, {"name": "crc32c"}]
    if compressed:
        settings = {"typesize": dtype.itemsize, **BLOSC}
        codecs.insert(1, {"name": "blosc", "configuration": settings})
    index = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    width = list(shape[1:])
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [slab, *width]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": fill_value,
        "codecs": [
            {
                "name": "sharding_indexed",
                "configuration": {
                    "chunk_shape": [chunk, *width],
                    "codecs": codecs,
                    "index_codecs": index,
                    "index_location": "end",
                },
            }
        ],
        "attributes": {},
        "dimension_names": list(names),
    }


class Form:
    """How the rows of an array lie in its files, read from its metadata."""

    def __init__(self, metadata: dict[str, Any]):
        self.rows, *self.width = metadata["shape"]
        self.dtype = np.dtype(metadata["data_type"]).newbyteorder("<")
        self.slab = metadata["chunk_grid"]["configuration"]["chunk_shape"][0]
        self.chunk, codecs = self.slab, metadata["codecs"]
        # The first shards held small arrays as one object, which is a chunk without an index.
        self.indexed = codecs[0]["name"] == "sharding_indexed"
        if self.indexed:
            self.chunk = codecs[0]["configuration"]["chunk_shape"][0]
            codecs = codecs[0]["configuration"]["codecs"]
        self.compressed = any(c["name"] == "blosc" for c in codecs)
        self.chunk_bytes = self.chunk * int(np.prod(self.width, dtype=int)) * self.dtype.itemsize

    def files(self) -> list[str]:
        """Paths of all files below the array's folder."""
        rest = ["0"] * len(self.width)
        return ["/".join(("c", str(k), *rest)) for k in range(-(-self.rows // self.slab))]


class ArrayWriter:
    """Writes one array chunk after chunk; whole files follow one another."""

    def __init__(self, folder: Path, metadata: dict[str, Any]):
        self.folder = folder
        self.form = Form(metadata)
        self.fill_value = metadata["fill_value"]
        self.names = iter(self.form.files())
        self.file: BinaryIO | None = None
        self.index = np.empty(self.form.slab // self.form.chunk, INDEX_ENTRY)
        self.chunks = 0  # in the present file

    def append(self, rows: np.ndarray) -> None:
        """Write the next chunk. Only the last one of an array may be shorter than a chunk."""
        form = self.form
        if len(rows) < form.chunk:  # the format has whole chunks only
            filling = np.full((form.chunk - len(rows), *form.width), self.fill_value, form.dtype)
            rows = np.concatenate([rows, filling])
        data: Any = np.ascontiguousarray(rows, form.dtype).reshape(-1).view(np.uint8)
        if form.compressed:
            how = dict(BLOSC, shuffle=blosc.SHUFFLE)
            cname = how.pop("cname").encode()
            data = blosc.compress(data, cname, **how, typesize=form.dtype.itemsize)
        if self.file is None:
            path = self.folder / next(self.names)
            path.parent.mkdir(parents=True, exist_ok=True)
            # Unbuffered: after a failed write nothing is left to be written when it is closed.
            self.file = open(path, "wb", buffering=0)
            self.index[:] = (ABSENT, ABSENT)
            self.chunks = 0
        self.index[self.chunks] = (self.file.tell(), len(data) + CRC_BYTES)
        self._write(data)
        self.chunks += 1
        if self.chunks == len(self.index):
            self.finish()

    def finish(self) -> None:
        """End the present file."""
        if self.file is not None:
            self._write(self.index.view(np.uint8))
            self.close()

    def close(self) -> None:
        """Let go of the present file as it is."""
        if self.file is not None:
            self.file.close()
            self.file = None

    def _write(self, data: Any) -> None:
        for part in (data, google_crc32c.value(data).to_bytes(CRC_BYTES, "little")):
            view = memoryview(part)
            while view:  # a write may take only a part, such as when the disk gets full
                view = view[self.file.write(view) :]


class Folder:
    """An open folder. When another takes its place, files of this one are missing, not exchanged."""

    fd = None

    def __init__(self, path: str | Path):
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)

    def __del__(self):
        if self.fd is not None:
            os.close(self.fd)

    def is_at(self, path: str | Path) -> bool:
        """Whether `path` still is this folder."""
        return os.path.exists(path) and os.path.samestat(os.stat(path), os.fstat(self.fd))

    def open(self, file: str) -> int:
        """A descriptor to read a file by."""
        return os.open(file, os.O_RDONLY, dir_fd=self.fd)


class ArrayReader:
    """Reads rows of one array of a folder. Keeps no file open."""

    def __init__(self, folder: Folder, name: str, metadata: dict[str, Any]):
        self.folder = folder
        self.name = name
        self.form = Form(metadata)
        self.files = self.form.files()
        self.indices: dict[int, list[tuple[int, int]]] = {}

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows `start` to `stop`. Raises Damage, and OSError as the system gives it."""
        form = self.form
        out = np.empty((stop - start, *form.width), form.dtype)
        at = start
        while at < stop:
            k = at // form.slab
            first, end = k * form.slab, min(stop, (k + 1) * form.slab)  # of the file; of our part
            file = self.folder.open(f"{self.name}/{self.files[k]}")
            try:
                index = self._index(k, file)
                while at < end:
                    c = (at - first) // form.chunk
                    skip = at - first - c * form.chunk
                    take = min(form.chunk - skip, end - at)
                    self._chunk(file, *index[c], out[at - start : at - start + take], skip)
                    at += take
            finally:
                os.close(file)
        return out

    def _chunk(self, file: int, offset: int, size: int, into: np.ndarray, skip: int) -> None:
        """Fill `into` with the rows of a chunk from `skip` on."""
        form = self.form
        if offset == size == ABSENT:
            raise Damage("a chunk is missing")
        direct = not form.compressed and len(into) == form.chunk
        body = _bytes(into) if direct else np.empty(size - CRC_BYTES, np.uint8)
        if not form.compressed and size != form.chunk_bytes + CRC_BYTES:
            raise Damage(f"a chunk has {size - CRC_BYTES} bytes, expected {form.chunk_bytes}")
        _read(file, body, offset)
        if direct:
            return
        chunk = _unpacked(body, form.chunk_bytes) if form.compressed else body
        into[:] = chunk.view(form.dtype).reshape(-1, *form.width)[skip : skip + len(into)]

    def _index(self, k: int, file: int) -> list[tuple[int, int]]:
        """Offset and size of each chunk of file `k`, crc32c included."""
        if k not in self.indices:
            form, length = self.form, os.fstat(file).st_size
            if form.indexed:
                index = np.empty(form.slab // form.chunk, INDEX_ENTRY)
                end = length - index.nbytes - CRC_BYTES
                if end < 0:
                    raise Damage("a file ends too early")
                _read(file, _bytes(index), end)
            else:
                end = length
                index = np.array([(0, form.chunk_bytes + CRC_BYTES)], INDEX_ENTRY)
            entries = index.tolist()
            for offset, size in entries:
                if (offset, size) != (ABSENT, ABSENT) and not CRC_BYTES < size <= end - offset:
                    raise Damage("a file ends too early")
            self.indices[k] = entries
        return self.indices[k]


def _unpacked(body: np.ndarray, size: int) -> np.ndarray:
    length = int.from_bytes(body[4:8], "little")  # blosc's header: bytes when unpacked
    if length != size:
        raise Damage(f"a chunk unpacks to {length} bytes, expected {size}")
    chunk = np.empty(size, np.uint8)
    try:
        blosc.decompress(body, chunk)
    except (RuntimeError, ValueError) as e:
        raise Damage(f"a chunk cannot be unpacked ({e})") from None
    return chunk


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def _read(file: int, into: np.ndarray, offset: int) -> None:
    """Fill `into` with bytes that must have the checksum that follows them."""
    crc = bytearray(CRC_BYTES)
    if os.preadv(file, [into, crc], offset) != len(into) + CRC_BYTES:
        raise Damage("a file ends too early")
    if google_crc32c.value(into) != int.from_bytes(crc, "little"):
        raise Damage("a checksum is wrong")
