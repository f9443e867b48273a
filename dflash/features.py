"""Hidden states on disk: one Zarr v3 group a shard, written whole, checked whenever it is read.

Legend: N documents and P tokens of a shard · S tokens of one document · T taps · H hidden width ·
C tokens of a chunk, K chunks.

    hidden         uint16  [P, T, H]  bf16 bit patterns, documents one after the other
    last_hidden    uint16  [P, H]     the same of the last layer, before the final norm; not in all
    input_ids      int32   [P]        tokens of the documents
    loss_mask      bool    [P]        True where the target itself wrote the token
    offsets        int64   [N + 1]    document i is rows offsets[i] to offsets[i + 1]
    sample_id      uint8   [N, 16]    ASCII; Zarr v3 has no stable fixed-length string, bytes need none

bf16 is stored by its bits because Zarr has no such type; that is exact for every value. The codec
says how: `raw` as they are; `compact` losslessly compressed to 0.70 of the bytes; `int8` as

    hidden         int8    [P, T, H]
    token_scale    float32 [P, T]
    channel_scale  uint16  [K, T, H]  bf16 bit patterns; a row for each C tokens

with an error of 0.6 % (`dflash.quantise`), while `last_hidden` is compressed losslessly. Reading gives
bf16 bits with every codec.

Every chunk ends in a crc32c, the metadata of each array is hashed in the group's attributes and these
carry their own hash, so damage is an error and never a wrong number. Whoever opens a shard may ask
for an identity (target, tokenizer, taps ...), and any other is refused. docs/features.md shows the
layout and what each codec costs.

`last_hidden` is there where the attribute of that name says what it is (else that is null). Its row
p gives, through the target's final norm and head, the target's distribution of token p + 1.

    python -m dflash.features inspect|verify results/features/SOURCE/SHARD.zarr
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import hashlib
import importlib.metadata
import json
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import google_crc32c
import numpy as np

from dflash import zarr3
from dflash.config import Codec, canonical
from dflash.errors import UserError, entrypoint, explain_oserror
from dflash.files import read_json, text_sha256, whole, write_json
from dflash.progress import progress
from dflash.quantise import dequantise, quantise

FORMAT = "dflash-features"
FORMAT_VERSION = 1
FILL = 0x7FC1  # a bf16 NaN with a payload that no arithmetic makes
EXPONENT = 0x7F80  # all bits of a bf16 exponent: NaN or infinity
# Most bytes of bf16 in a chunk, all of which are read for a document that touches it: few for `raw`;
# the others compress better, and have fewer scales, in longer ones.
CHUNK_BYTES = {"raw": 5 << 18, "compact": 5 << 19, "int8": 5 << 19}
SLAB_BYTES = 320 << 20  # most bytes of bf16 in a file
FLAT_CHUNK = 1 << 14  # rows of input_ids and loss_mask that are read together
SAMPLE_ID = re.compile(r"[0-9a-f]{16}")

TARGET_FIELDS = (
    "model",
    "revision",
    "weights_sha256",
    "tokenizer_sha256",
    "chat_template_sha256",
    "num_hidden_layers",
    "hidden_size",
)
TAP_CONVENTION = (
    "output of 0-based decoder layer i, before the final norm (Hugging Face hidden_states[i+1])"
)
LAST_HIDDEN = "output of the last decoder layer, before the final norm"
RECORDS = (  # attributes that are not identity
    "format",
    "format_version",
    "codec",
    "counts",
    "versions",
    "content_sha256",
    "arrays_sha256",
    "attributes_sha256",
)
ARRAYS = (
    "hidden",
    "last_hidden",
    "token_scale",
    "channel_scale",
    "input_ids",
    "loss_mask",
    "offsets",
    "sample_id",
)
COUNTS = (
    "documents",
    "tokens",
    "supervised_tokens",
    "documents_cut",
    "documents_too_short",
    "documents_without_supervision",
)


@dataclass(frozen=True)
class Document:
    """One document with its hidden states."""

    sample_id: str
    input_ids: np.ndarray  # int32 [S]
    loss_mask: np.ndarray  # bool [S]
    hidden: np.ndarray  # uint16 [S, T, H], bf16 bit patterns
    last_hidden: np.ndarray | None = None  # uint16 [S, H], likewise, before the final norm


def store_identity(target: Any) -> dict[str, Any]:
    """What must be equal in every shard made with a target (a `dflash.target.Identity`).

    This is what a reader passes as `expect`: features of another target are refused.
    """
    return {
        **{name: getattr(target, name) for name in TARGET_FIELDS},
        "tap_convention": TAP_CONVENTION,
        "logical_dtype": "bfloat16",
    }


def shard_identity(
    target: Any,
    taps: Sequence[int],
    compute_dtype: str,
    settings_sha256: str,
    tokens_sha256: str,
    last_hidden: bool = False,
) -> dict[str, Any]:
    """Everything that decides what a shard holds.

    `target` is a `dflash.target.Identity`; `taps` are layer ids; `tokens_sha256` hashes the file
    that the documents came from, so that features of an older answer are not taken for new ones;
    `last_hidden` says whether the last hidden state is stored as well.
    """
    return {
        **store_identity(target),
        "taps": list(taps),
        "last_hidden": LAST_HIDDEN if last_hidden else None,
        "compute_dtype": compute_dtype,
        "settings_sha256": settings_sha256,
        "tokens_sha256": tokens_sha256,
    }


def layout(
    tokens: int,
    row_bytes: int,
    chunk_bytes: int = CHUNK_BYTES["raw"],
    slab_bytes: int = SLAB_BYTES,
) -> tuple[int, int]:
    """Tokens in one chunk of `hidden`, and in one slab (a file), of `row_bytes` of bf16 a token.

    All states have chunks and files of as many tokens. A chunk is the largest power of two of tokens
    within `chunk_bytes`: for `raw`, 128 at 5 x 576 and 32 at 5 x 4096, twice that for the others. Slabs
    share the chunks evenly, so that the last one is not mostly empty.
    """
    chunk = min(tokens, 1 << max(1, chunk_bytes // row_bytes).bit_length() - 1)
    chunks = math.ceil(tokens / chunk)
    slabs = math.ceil(chunks / max(1, slab_bytes // (chunk * row_bytes)))
    return chunk, chunk * math.ceil(chunks / slabs)


def nonfinite(hidden: np.ndarray) -> bool:
    """Whether any bf16 bit pattern of a uint16 array is a NaN or an infinity."""
    # Without their sign, patterns are ordered as the magnitudes are: one maximum tells all.
    return bool(hidden.size and (hidden << 1).max() >= EXPONENT << 1)


# --- writing ----------------------------------------------------------------------------------


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the only right to write `path`; the kernel frees it when the process ends, however.

    Raises UserError when another writer holds it.
    """
    lock = path.parent / f".{path.name}.lock"
    while True:
        with _naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise UserError(
                f"{path}: another process is writing this shard; wait for it or stop it"
            ) from None
        # A writer that just finished may have deleted the file we locked: then lock its successor.
        if lock.exists() and os.path.samestat(os.fstat(fd), os.stat(lock)):
            break
        os.close(fd)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(fd)


class ShardWriter:
    """Receives the documents of one shard in order. Made by `write_shard`.

    Holds one chunk of hidden states, and one of last hidden states if they are stored.
    """

    def __init__(
        self,
        folder: Path,
        path: Path,
        identity: Mapping[str, Any],
        documents: int,
        tokens: int,
        dropped: Mapping[str, int],
        codec: Codec,
        chunk_bytes: int,
        slab_bytes: int,
    ):
        self.folder = folder
        self.path = path
        self.identity = json.loads(canonical(dict(identity)))
        self.dropped = dict(dropped)
        self.codec = codec
        self.widths = {"hidden": (len(self.identity["taps"]), self.identity["hidden_size"])}
        if self.identity["last_hidden"] is not None:
            self.widths["last_hidden"] = (self.identity["hidden_size"],)
        self.tokens = tokens
        self.sample_ids: dict[str, None] = {}
        self.offsets = np.zeros(documents + 1, np.int64)
        self.input_ids = np.empty(tokens, np.int32)
        self.loss_mask = np.empty(tokens, np.bool_)
        row_bytes = 2 * math.prod(self.widths["hidden"])
        self.chunk, self.slab = layout(tokens, row_bytes, chunk_bytes, slab_bytes)
        self.buffers = {n: np.empty((self.chunk, *w), np.uint16) for n, w in self.widths.items()}
        self.filled = 0  # rows of the buffers
        self.written = 0  # rows of hidden states on disk
        self.crc32c = dict.fromkeys(self.widths, 0)  # of all rows on disk, as they will be read
        self.arrays: dict[str, zarr3.ArrayWriter] = {}
        self.metadata: dict[str, dict[str, Any]] = {}
        with _naming(path):
            self._create_states()

    def _create_states(self) -> None:
        taps, channels = self.widths["hidden"]
        states: dict[str, Any] = {"fill_value": FILL, "compressed": self.codec != "raw"}
        if "last_hidden" in self.widths:
            names = ("token", "channel")
            self._create("last_hidden", (self.tokens, channels), np.uint16, names, **states)
        names = ("token", "tap", "channel")
        shape = (self.tokens, taps, channels)
        if self.codec != "int8":
            self._create("hidden", shape, np.uint16, names, **states)
            return
        self._create("hidden", shape, np.int8, names, fill_value=-128)
        self._create("token_scale", shape[:2], np.float32, names[:2], fill_value="NaN")
        chunks = math.ceil(self.tokens / self.chunk)
        self._create(
            "channel_scale",
            (chunks, taps, channels),
            np.uint16,
            ("chunk", *names[1:]),
            fill_value=FILL,
            chunk=1,
            slab=self.slab // self.chunk,
        )

    def _create(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: type[np.generic],
        names: tuple[str | None, ...],
        fill_value: Any,
        chunk: int | None = None,
        slab: int | None = None,
        compressed: bool = False,
    ) -> zarr3.ArrayWriter:
        """Start an array of chunks and files as long as those of `hidden`, unless others are given."""
        self.metadata[name] = zarr3.metadata(
            shape,
            np.dtype(dtype),
            chunk or self.chunk,
            slab or self.slab,
            fill_value,
            names,
            compressed,
        )
        (self.folder / name).mkdir()
        text = json.dumps(self.metadata[name], indent=2)
        (self.folder / name / "zarr.json").write_text(text, encoding="utf-8")
        self.arrays[name] = zarr3.ArrayWriter(self.folder / name, self.metadata[name])
        return self.arrays[name]

    def add(self, document: Document) -> None:
        """Append one document.

        Raises UserError when its hidden states are not finite, and ValueError when it does not fit
        what was announced (a mistake in the calling program).
        """
        length = len(document.input_ids)
        index, start = len(self.sample_ids), self.written + self.filled
        _check_document(document, self.widths)
        if document.sample_id in self.sample_ids:
            raise ValueError(f"sample {document.sample_id} was added twice")
        if index == len(self.offsets) - 1 or start + length > self.tokens:
            raise ValueError(f"more than {self.tokens} tokens or {index} documents were added")
        for name in self.widths:
            if nonfinite(getattr(document, name)):
                raise UserError(self._nonfinite(document, name))
        self.sample_ids[document.sample_id] = None
        self.offsets[index + 1] = start + length
        self.input_ids[start : start + length] = document.input_ids
        self.loss_mask[start : start + length] = document.loss_mask
        done = 0
        while done < length:
            take = min(length - done, self.chunk - self.filled)
            for name, buffer in self.buffers.items():
                rows = getattr(document, name)[done : done + take]
                buffer[self.filled : self.filled + take] = rows
            self.filled += take
            done += take
            if self.filled == self.chunk:
                self._flush()

    def finish(self) -> dict[str, Any]:
        """Write what is left and the attributes, which are returned. Called by `write_shard`."""
        if self.filled:
            self._flush()
        if self.written != self.tokens or len(self.sample_ids) != len(self.offsets) - 1:
            raise ValueError(
                f"{self.path}: announced {len(self.offsets) - 1} documents and {self.tokens} "
                f"tokens, got {len(self.sample_ids)} and {self.written}"
            )
        ids = np.frombuffer("".join(self.sample_ids).encode("ascii"), np.uint8).reshape(-1, 16)
        with _naming(self.path):
            for name in self.arrays:
                self.arrays[name].finish()
            self._flat("input_ids", self.input_ids, -1, FLAT_CHUNK)
            self._flat("loss_mask", self.loss_mask, False, FLAT_CHUNK)
            self._flat("offsets", self.offsets, -1)
            self._flat("sample_id", ids, 0)
            attributes = self._attributes(
                _content_sha256(self.offsets, ids, self.input_ids, self.loss_mask, self.crc32c)
            )
            group = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
            text = json.dumps(group, indent=2)
            (self.folder / "zarr.json").write_text(text, encoding="utf-8")
        return attributes

    def close(self) -> None:
        """Let go of all files. Called by `write_shard`."""
        for array in self.arrays.values():
            array.close()

    def _flush(self) -> None:
        with _naming(self.path):
            for name, buffer in self.buffers.items():
                bits = buffer[: self.filled]
                if name == "hidden" and self.codec == "int8":
                    q, token, channel = quantise(bits)
                    self.arrays["hidden"].append(q)
                    self.arrays["token_scale"].append(token)
                    self.arrays["channel_scale"].append(channel[None])
                    bits = dequantise(q, token, channel)
                    if nonfinite(bits):  # within half a step of the largest number
                        raise UserError(
                            f"{self.path}: hidden states close to the largest bf16 number, which int8 "
                            "cannot keep; set `extract.codec: compact`"
                        )
                else:
                    self.arrays[name].append(bits)
                self.crc32c[name] = _crc32c(self.crc32c[name], bits)
        self.written, self.filled = self.written + self.filled, 0

    def _flat(self, name: str, data: np.ndarray, fill_value: Any, chunk: int | None = None) -> None:
        """Write a small array in one file, in chunks of so many rows (default: all)."""
        chunk = min(len(data), chunk or len(data))
        slab = chunk * math.ceil(len(data) / chunk)
        names = (None,) * data.ndim
        array = self._create(name, data.shape, data.dtype.type, names, fill_value, chunk, slab)
        for start in range(0, len(data), chunk):
            array.append(data[start : start + chunk])
        array.finish()

    def _attributes(self, content_sha256: str) -> dict[str, Any]:
        counts = dict.fromkeys(COUNTS, 0) | self.dropped
        counts["documents"] = len(self.sample_ids)
        counts["tokens"] = self.tokens
        counts["supervised_tokens"] = int(self.loss_mask.sum())
        attributes = {
            **self.identity,
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "codec": self.codec,
            "counts": counts,
            "versions": {
                name: importlib.metadata.version(name)
                for name in ("dflash", "torch", "transformers", "numcodecs")
            },
            "content_sha256": content_sha256,
            "arrays_sha256": {
                name: text_sha256(canonical(metadata))
                for name, metadata in sorted(self.metadata.items())
            },
        }
        return attributes | {"attributes_sha256": text_sha256(canonical(attributes))}

    def _nonfinite(self, document: Document, name: str) -> str:
        states = getattr(document, name)
        bad = (states & EXPONENT) == EXPONENT
        at = tuple(int(x) for x in np.argwhere(bad)[0])
        token, channel = at[0], at[-1]
        layer = "last layer" if len(at) == 2 else f"layer {self.identity['taps'][at[1]]}"
        value = "NaN" if states[at] & 0x7F else "infinity"
        return (
            f"{self.path}: sample {document.sample_id}: the target's {layer} gave {value} at token "
            f"{token}, channel {channel} "
            f"({int(bad.sum())} such values); every value must be finite: check the target's "
            "weights, or set `target.dtype: float32`"
        )


@contextmanager
def write_shard(
    path: str | Path,
    identity: Mapping[str, Any],
    documents: int,
    tokens: int,
    manifest: str | Path | None = None,
    dropped: Mapping[str, int] | None = None,
    codec: Codec = "raw",
    chunk_bytes: int | None = None,
    slab_bytes: int = SLAB_BYTES,
) -> Iterator[ShardWriter]:
    """Write one shard, which appears whole when the block ends and not at all when it fails.

    `identity` is that of `shard_identity`; `documents` and `tokens` are the totals to come.
    `dropped` counts what the caller cut or left out (`documents_cut`, `documents_too_short`,
    `documents_without_supervision`); it is kept in the attributes and in the manifest (default:
    `path` with the suffix .json), which is the last file to appear. `codec` says how hidden states are
    stored. Raises UserError for a second writer, for hidden states that are not finite and for a full
    disk.
    """
    path = Path(os.path.abspath(path))
    manifest = Path(manifest) if manifest else path.with_suffix(".json")
    if documents < 1 or tokens < documents:
        raise ValueError(f"{path}: {documents} documents of {tokens} tokens make no shard")
    with exclusive(path), ExitStack() as stack:
        with _naming(path):
            folder = stack.enter_context(whole(path, folder=True, outdated=manifest))
        writer = ShardWriter(
            folder,
            path,
            identity,
            documents,
            tokens,
            dropped or {},
            codec,
            chunk_bytes or CHUNK_BYTES[codec],
            slab_bytes,
        )
        with closing(writer):
            yield writer
            attributes = writer.finish()
        with _naming(path):  # the caller's own errors are not ours to name
            stack.close()
            write_json(manifest, manifest_of(attributes, path))


def manifest_of(attributes: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """What the manifest of a shard says: all of it follows from the shard itself."""
    return {
        "shard": path.name,
        **attributes["counts"],
        "taps": attributes["taps"],
        "hidden_size": attributes["hidden_size"],
        "bytes": _size(path),
        "content_sha256": attributes["content_sha256"],
        "identity": _identity(attributes),
    }


def _identity(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in attributes.items() if k not in RECORDS}


def _crc32c(crc32c: int, array: np.ndarray) -> int:
    """Go on with a checksum over the bytes of one more array."""
    return google_crc32c.extend(crc32c, array.reshape(-1).view(np.uint8))


def _content_sha256(
    offsets: np.ndarray,
    ids: np.ndarray,
    tokens: np.ndarray,
    mask: np.ndarray,
    crc32c: Mapping[str, int],
) -> str:
    """One name for all that is stored: a SHA-256 over the small arrays and the crc32c of `hidden` and
    `last_hidden` (hashing these in full would take as long as writing them)."""
    digest = hashlib.sha256("".join(f"{crc32c[name]:08x}" for name in sorted(crc32c)).encode())
    for array in (offsets, ids, tokens, mask):
        digest.update(np.ascontiguousarray(array))
    return digest.hexdigest()


def _check_document(document: Document, widths: Mapping[str, tuple[int, ...]]) -> None:
    length = len(document.input_ids)
    if not SAMPLE_ID.fullmatch(document.sample_id):
        raise ValueError(f"sample id {document.sample_id!r} is not 16 hexadecimal characters")
    if length < 1 or document.loss_mask.shape != (length,):
        raise ValueError(f"sample {document.sample_id}: input_ids and loss_mask differ in length")
    if document.last_hidden is not None and "last_hidden" not in widths:
        raise ValueError(f"sample {document.sample_id}: last_hidden is given, but not announced")
    for name, width in widths.items():
        states = getattr(document, name)
        if states is None or states.dtype != np.uint16 or states.shape != (length, *width):
            found = "absent" if states is None else f"{states.dtype} {list(states.shape)}"
            raise ValueError(
                f"sample {document.sample_id}: {name} is {found}, expected uint16 "
                f"{[length, *width]}"
            )


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turn a file-system failure, which may name no file, into a sentence."""
    try:
        yield
    except OSError as e:
        raise UserError(f"{path}: {explain_oserror(e)}") from None


def _size(path: Path) -> int:
    """Bytes of all files of a shard."""
    return sum(f.stat().st_size for f in _files(path))


def _files(path: Path) -> list[Path]:
    """The shard's own files, without what file managers and people leave among them."""
    names = (f for f in path.rglob("*") if f.name == "zarr.json" or f.name.isdecimal())
    return [f for f in names if f.is_file()]


# --- reading ----------------------------------------------------------------------------------


class Shard:
    """A shard to read from. Made by `open_shard`, which checks it.

    Can be sent to other processes: it opens its folder again when it is first needed there. Between
    calls it holds one file descriptor (the folder's), the arrays `offsets` and `sample_id`, those of
    `input_ids` and `loss_mask` that were read as a whole, and the files' indices; `close` lets go of all
    of it. Several threads may read at once, but none while another closes.
    """

    def __init__(self, path: Path, attributes: dict[str, Any]):
        self.path = path
        self.attributes = attributes
        self.taps: list[int] = attributes["taps"]  # layer ids
        self.counts: dict[str, int] = attributes["counts"]

    def __len__(self) -> int:
        return self.counts["documents"]

    def __getstate__(self) -> dict[str, Any]:
        return {k: self.__dict__[k] for k in ("path", "attributes", "taps", "counts")}

    def close(self) -> None:
        """Free all memory and file descriptors; what is needed again is opened again."""
        self.__dict__ = self.__getstate__()

    @property
    def identity(self) -> dict[str, Any]:
        """All that decides what the shard holds."""
        return _identity(self.attributes)

    @cached_property
    def offsets(self) -> np.ndarray:
        """int64 [N + 1]: where each document starts, and the total."""
        offsets = self._rows("offsets")
        tokens = self.counts["tokens"]
        if offsets[0] != 0 or offsets[-1] != tokens or (np.diff(offsets) < 1).any():
            raise self._damaged(f"offsets do not rise from 0 to the {tokens} tokens")
        return offsets

    @cached_property
    def lengths(self) -> np.ndarray:
        """int64 [N]: tokens of each document."""
        return np.diff(self.offsets)

    @cached_property
    def sample_ids(self) -> list[str]:
        """The documents' ids, in order."""
        ids = [self._sample_id(i) for i in range(len(self))]
        if len(set(ids)) != len(ids):
            raise self._damaged("sample ids are not distinct")
        return ids

    def _sample_id(self, i: int) -> str:
        sample_id = self._id_bytes[i].tobytes().decode("latin-1")
        if not SAMPLE_ID.fullmatch(sample_id):
            raise self._damaged(f"sample id {sample_id!r} is not 16 hexadecimal characters")
        return sample_id

    @property
    def content_sha256(self) -> str:
        """One name for all that is stored (see `_content_sha256`)."""
        return self.attributes["content_sha256"]

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return _size(self.path)

    @cached_property
    def _id_bytes(self) -> np.ndarray:
        return self._rows("sample_id")

    @cached_property
    def _input_ids(self) -> np.ndarray:
        ids = self._rows("input_ids")
        if (ids < 0).any():
            raise self._damaged("input_ids has negative values")
        return ids

    @cached_property
    def _loss_mask(self) -> np.ndarray:
        mask = self._rows("loss_mask")
        if mask.sum() != self.counts["supervised_tokens"]:
            raise self._damaged(
                f"loss_mask marks {mask.sum()} tokens, not {self.counts['supervised_tokens']}"
            )
        return mask

    def tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """All documents laid end to end: input_ids int32 [P], loss_mask bool [P]."""
        return self._input_ids.copy(), self._loss_mask.copy()

    def loss_mask(self, i: int) -> np.ndarray:
        """bool [S]: which tokens of document `i` the target wrote."""
        return self._part("loss_mask", self._span(i))

    def _part(self, name: str, span: slice) -> np.ndarray:
        """Some rows of `input_ids` or `loss_mask`, without reading the others if they lie elsewhere."""
        if "_" + name in self.__dict__ or self._array(name).form.chunk >= self.counts["tokens"]:
            return getattr(self, "_" + name)[span].copy()
        return self._rows(name, span.start, span.stop)

    @cached_property
    def supervised(self) -> np.ndarray:
        """int64 [N]: tokens of each document that the target wrote."""
        return np.add.reduceat(self._loss_mask.astype(np.int64), self.offsets[:-1])

    def tap_positions(self, layer_ids: Sequence[int]) -> list[int]:
        """Where these layers are in the stored taps. Raises UserError when one is not stored."""
        missing = [i for i in layer_ids if i not in self.taps]
        if missing:
            raise UserError(
                f"{self.path}: holds the taps {self.taps}, but {missing} are asked for too; run "
                "extract again with this drafter in the settings"
            )
        return [self.taps.index(i) for i in layer_ids]

    def require_last_hidden(self) -> None:
        """Raises UserError when the target's last hidden state is not stored before its final norm."""
        found = self.attributes["last_hidden"]
        if found != LAST_HIDDEN:
            what = "no last hidden state" if found is None else repr(found)
            raise UserError(
                f"{self.path}: holds {what}, but "
                "`training.loss.labels` other than `data` needs the target's last hidden state before "
                "its final norm; run extract again with this drafter in the settings"
            )

    def read(
        self, i: int, taps: Sequence[int] | None = None, last_hidden: bool = False
    ) -> Document:
        """Document `i` with all taps, or those at the given positions (see `tap_positions`).

        With `last_hidden`, also with that. Raises UserError when it is not stored, and when anything
        stored is damaged or missing; nothing is ever substituted.
        """
        span, sample_id = self._span(i), self._sample_id(i)
        hidden = self._states("hidden", span.start, span.stop)
        last = None
        if last_hidden:
            self.require_last_hidden()
            last = self._states("last_hidden", span.start, span.stop)
        return Document(
            sample_id,
            self._part("input_ids", span),
            self._part("loss_mask", span),
            hidden if taps is None else hidden[:, list(taps)],
            last,
        )

    def _states(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows of `hidden` or `last_hidden` as bf16 bits, whatever the codec."""
        stored = self._rows(name, start, stop)
        if stored.dtype != np.int8:
            return stored
        chunk = self._array(name).form.chunk
        first, last = start // chunk, math.ceil(stop / chunk)
        token = self._rows("token_scale", start, stop)
        channel = self._rows("channel_scale", first, last)
        bits = np.empty(stored.shape, np.uint16)
        for k in range(first, last):
            rows = slice(max(k * chunk - start, 0), (k + 1) * chunk - start)
            bits[rows] = dequantise(stored[rows], token[rows], channel[k - first])
        return bits

    def _span(self, i: int) -> slice:
        if not 0 <= i < len(self):
            raise IndexError(f"{self.path}: no document {i} among {len(self)}")
        return slice(int(self.offsets[i]), int(self.offsets[i + 1]))

    def _rows(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        array = self._array(name)
        token = None if stop is None else start  # of the whole array, no one document is wrong
        if name == "channel_scale":
            token = start * self._array("hidden").form.chunk
        try:
            return array.read(start, array.form.rows if stop is None else stop)
        except zarr3.Damage as e:
            raise self._damaged(f"{name}: {e}", token) from None
        except FileNotFoundError as e:
            if not self._folder.is_at(self.path):
                raise self._replaced() from None
            raise self._damaged(f"{e.filename} is missing", token) from None
        except OSError as e:
            if e.errno in (errno.EIO, errno.ENOTDIR, errno.EISDIR):
                raise self._damaged(f"{name}: {e.strerror}", token) from None
            raise _unreadable(self.path, e) from None

    def _array(self, name: str) -> zarr3.ArrayReader:
        if name not in self._arrays:
            sha256 = self.attributes["arrays_sha256"][name]
            metadata = _metadata(self.path, self._folder, name, sha256)
            self._arrays[name] = zarr3.ArrayReader(self._folder, name, metadata)
        return self._arrays[name]

    @cached_property
    def _arrays(self) -> dict[str, zarr3.ArrayReader]:
        return {}

    @cached_property
    def _folder(self) -> zarr3.Folder:
        folder = _open_folder(self.path)
        # It may be opened long after its attributes were read, and in another process.
        if _json(self.path, folder, "zarr.json").get("attributes") != self.attributes:
            raise self._replaced()
        return folder

    def _replaced(self) -> UserError:
        return UserError(
            f"{self.path}: was removed or replaced since it was opened; start again with what is there"
        )

    def _damaged(self, what: str, token: int | None = None) -> UserError:
        """An error that names the document of the token at a row."""
        offsets, i = self.__dict__.get("offsets"), None
        if token is not None and offsets is not None:
            i = int(np.searchsorted(offsets, token, side="right")) - 1
        where = "" if i is None else f" document {i}:"
        ids = self.__dict__.get("_id_bytes")
        if i is not None and ids is not None:
            where = f" document {i} (sample {ids[i].tobytes().decode('latin-1')}):"
        return _damage(self.path, f"{where} {what}".strip())


def open_shard(
    path: str | Path,
    expect: Mapping[str, Any] | None = None,
    manifest: str | Path | None = None,
) -> Shard:
    """Open a shard after checking that it is whole and what is wanted; reads a few small files.

    `expect` gives identity fields that must be equal (see `store_identity`, `shard_identity`), and
    perhaps the `codec`. A manifest that is given must exist and agree, one beside the shard must agree
    if it exists. Raises UserError that names each differing field or the damage.
    """
    shard, differing = _open(path, expect, manifest)
    if differing:
        raise UserError(
            f"{shard.path}: {differing}; `python -m dflash.features verify {shard.path}` tells whether "
            "it is damaged"
        )
    return shard


def _open(
    path: str | Path,
    expect: Mapping[str, Any] | None = None,
    manifest: str | Path | None = None,
) -> tuple[Shard, str]:
    """As `open_shard`; also says in what the manifest differs if that need not mean damage."""
    path = Path(os.path.abspath(path))  # `.` has no name
    if path.is_file():
        raise UserError(f"{path}: is a file; give a shard, which is a folder SHARD.zarr")
    if not path.is_dir():
        raise UserError(f"{path}: no such shard; run the extract stage, which writes it")
    folder = _open_folder(path)
    if not any(os.path.lexists(path / name) for name in ("zarr.json", *ARRAYS)):
        raise UserError(
            f"{path}: not a shard (zarr.json is missing); give the path of a SHARD.zarr"
        )
    attributes = _attributes(path, folder)
    found = _identity(attributes) | {"codec": attributes["codec"]}
    _check_expected(path, found, expect or {})
    for name, sha256 in attributes["arrays_sha256"].items():
        _check_array(path, name, _metadata(path, folder, name, sha256), attributes)
    given, manifest = bool(manifest), Path(manifest or path.with_suffix(".json"))
    differing = ""
    if given and not manifest.exists():
        raise UserError(
            f"{path}: its manifest {manifest} is missing; run the extract stage, which writes one"
        )
    if manifest.exists():
        found, wanted = read_json(manifest), manifest_of(attributes, path)
        if found != wanted:
            found = found if isinstance(found, dict) else {}
            keys = sorted(k for k in found | wanted if found.get(k) != wanted.get(k))
            differing = f"differs from its manifest {manifest} in "
            if not {"content_sha256", *COUNTS}.isdisjoint(keys):
                raise _damage(path, differing + ", ".join(keys))
            differing += ", ".join(
                f"{key} ({found.get(key)!r} there, {wanted[key]!r} here)"
                if key in ("shard", "bytes")
                else key
                for key in keys
            )
    shard = Shard(path, attributes)
    _ = shard.offsets  # checks them
    shard.close()  # thousands of shards may be open: each holds something only once it is read
    return shard, differing


def _damage(path: Path, what: str) -> UserError:
    return UserError(f"{path}: damaged: {what}; delete this folder and run extract again")


def _unreadable(path: Path, e: OSError) -> UserError:
    """A failure to read that is not the shard's."""
    why = explain_oserror(e)
    if e.errno in (errno.EACCES, errno.EPERM):
        why = f"no permission to read {e.filename}: change its mode, or run as its owner"
    return UserError(f"{path}: {why}")


def _open_folder(path: Path) -> zarr3.Folder:
    try:
        return zarr3.Folder(path)
    except (FileNotFoundError, NotADirectoryError):
        raise _damage(path, "the folder is missing") from None
    except OSError as e:
        raise _unreadable(path, e) from None


def _json(path: Path, folder: zarr3.Folder, file: str) -> dict[str, Any]:
    try:
        with open(folder.open(file), "rb") as f:
            data = json.loads(f.read(), object_hook=_shared)
    except (FileNotFoundError, NotADirectoryError):
        raise _damage(path, f"{file} is missing") from None
    except OSError as e:
        raise _unreadable(path, e) from None
    except (ValueError, RecursionError) as e:
        raise _damage(path, f"{file} is not JSON ({e})") from None
    if not isinstance(data, dict):
        raise _damage(path, f"{file} is not a JSON object")
    return data


def _shared(found: dict[str, Any]) -> dict[str, Any]:
    """The same with one copy of equal strings: thousands of shards have most of theirs in common."""
    return {sys.intern(k): sys.intern(v) if isinstance(v, str) else v for k, v in found.items()}


def _attributes(path: Path, folder: zarr3.Folder) -> dict[str, Any]:
    """The group's attributes, once their format, version and hash are right."""
    group = _json(path, folder, "zarr.json")
    attributes = group.get("attributes")
    if not isinstance(attributes, dict) or attributes.get("format") != FORMAT:
        raise UserError(f"{path}: not a {FORMAT} folder; give the path of a shard of features")
    codecs = get_args(Codec)
    if attributes.get("format_version") != FORMAT_VERSION or attributes.get("codec") not in codecs:
        raise UserError(
            f"{path}: format version {attributes.get('format_version')!r}, codec "
            f"{attributes.get('codec')!r}; this program reads version {FORMAT_VERSION}, codecs "
            f"{', '.join(codecs)}: run extract again, or use the program that wrote it"
        )
    rest = {k: v for k, v in attributes.items() if k != "attributes_sha256"}
    try:
        right = text_sha256(canonical(rest)) == attributes.get("attributes_sha256")
    except ValueError:  # NaN is JSON to Python
        right = False
    if not right or group.get("zarr_format") != 3 or group.get("node_type") != "group":
        raise _damage(path, "the attributes in zarr.json do not have the hash they name")
    return attributes


def _check_expected(path: Path, identity: Mapping[str, Any], expect: Mapping[str, Any]) -> None:
    wanted = json.loads(canonical(dict(expect)))
    differing = [
        f"{key} is {identity.get(key, 'not recorded')!r} here, {value!r} is asked for"
        for key, value in wanted.items()
        if key not in identity or identity[key] != value
    ]
    if differing:
        raise UserError(
            f"{path}: features of something else: {'; '.join(differing)}; run extract again with "
            "the present settings, or give the folder that belongs to them"
        )


def _metadata(path: Path, folder: zarr3.Folder, name: str, sha256: str) -> dict[str, Any]:
    """An array's zarr.json, once it has its hash."""
    metadata = _json(path, folder, f"{name}/zarr.json")
    try:
        right = text_sha256(canonical(metadata)) == sha256
    except ValueError:
        right = False
    if not right:
        raise _damage(path, f"{name}/zarr.json does not have the hash that the attributes name")
    return metadata


def _check_array(
    path: Path, name: str, metadata: dict[str, Any], attributes: Mapping[str, Any]
) -> None:
    """Of the shape that the counts imply, and no file missing."""
    documents, tokens = attributes["counts"]["documents"], attributes["counts"]["tokens"]
    taps, channels = len(attributes["taps"]), attributes["hidden_size"]
    form = zarr3.Form(metadata)
    shape = {
        "hidden": [tokens, taps, channels],
        "last_hidden": [tokens, channels],
        "token_scale": [tokens, taps],
        "channel_scale": [form.rows, taps, channels],  # of each chunk of `hidden`
        "offsets": [documents + 1],
        "sample_id": [documents, 16],
    }.get(name, [tokens])
    if metadata["shape"] != shape:
        raise _damage(path, f"{name} has shape {metadata['shape']}, the counts say {shape}")
    for file in form.files():
        if not (path / name / file).is_file():
            raise _damage(path, f"{name}/{file} is missing")


def verify(path: str | Path) -> dict[str, Any]:
    """Read all of a shard and check every checksum, count, value and offset; returns its manifest.

    Raises UserError at the first damage, and for a whole shard whose manifest says anything else.
    """
    shard, differing = _open(path)
    _ = shard.offsets, shard.sample_ids  # checks them
    names = [n for n in ("hidden", "last_hidden") if n in shard.attributes["arrays_sha256"]]
    crc32c, tokens = dict.fromkeys(names, 0), shard.counts["tokens"]
    step = 4 * shard._array("hidden").form.chunk  # whole chunks, some MiB
    with progress(desc=f"verify {shard.path.name}", total=tokens, unit="tokens") as bar:
        for start in range(0, tokens, step):
            end = min(start + step, tokens)
            for name in names:
                rows = shard._states(name, start, end)
                if nonfinite(rows):
                    token = start + int(np.argwhere((rows & EXPONENT) == EXPONENT)[0, 0])
                    raise shard._damaged(f"{name} has a value that is not finite", token)
                crc32c[name] = _crc32c(crc32c[name], rows)
            bar.update(end - start)
    content = _content_sha256(
        shard.offsets, shard._id_bytes, shard._input_ids, shard._loss_mask, crc32c
    )
    if content != shard.content_sha256:
        raise shard._damaged("what is stored is not what the attributes' content_sha256 names")
    if differing:
        raise UserError(
            f"{shard.path}: whole, but {differing}; undo what was renamed, or delete the manifest "
            "alone and run `python -m dflash.extract`, which writes a new one (Snakemake would first "
            "remove the shard)"
        )
    return manifest_of(shard.attributes, shard.path)


# --- command line -----------------------------------------------------------------------------


def _inspect(path: Path) -> None:
    shard = open_shard(path)
    files = len(_files(shard.path))
    hidden = shard._array("hidden").form
    print(f"{path}: {FORMAT} version {FORMAT_VERSION}, codec {shard.attributes['codec']}")
    for part in ("identity", "counts", "versions"):
        print(f"  {part}")
        values = shard.identity if part == "identity" else shard.attributes[part]
        for key, value in values.items():
            print(f"    {key:<30} {value}")
    print("  storage")
    print(f"    {'size':<30} {shard.size / 1e6:,.1f} MB in {files} files")
    print(f"    {'tokens a chunk, a file':<30} {hidden.chunk}, {hidden.slab}")


def main(argv: list[str] | None) -> None:
    """`inspect` prints what shards are; `verify` reads them whole. Exit status 2 for a bad one."""
    parser = argparse.ArgumentParser(
        prog="python -m dflash.features", description="Look at stored hidden states, or check them."
    )
    parser.add_argument("command", choices=("inspect", "verify"))
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="a SHARD.zarr folder")
    args = parser.parse_args(argv)
    bad = 0
    for path in args.paths:
        try:
            if args.command == "inspect":
                _inspect(path)
            else:
                found = verify(path)
                print(f"{path}: fine: {found['documents']} documents, {found['tokens']} tokens")
        except UserError as e:
            if len(args.paths) == 1:
                raise
            print(f"error: {e}", file=sys.stderr)
            bad += 1
    if bad:
        raise UserError(f"{bad} of {len(args.paths)} shards are not fine (see above)")


if __name__ == "__main__":
    entrypoint(main)
