"""Files that appear whole or not at all, and their hashes.

Every output is written to a temporary sibling, flushed to disk and renamed into place, so that a
kill at any moment leaves either nothing or the finished file. Leftovers of killed writers carry the
`.partial` suffix and are removed by the next writer of the same output.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dflash.errors import UserError


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _clear_leftovers(path: Path) -> None:
    """Remove what killed writers of the same output left behind (their process is gone)."""
    own = re.compile(rf"\.{re.escape(path.name)}\.(?:old\.)?(\d+)\.partial")
    for old in path.parent.glob(f".{path.name}.*.partial"):
        match = own.fullmatch(old.name)  # `a.b` begins like `a`, and is another's
        if not match or (Path(f"/proc/{match[1]}").exists() and int(match[1]) != os.getpid()):
            continue
        _remove(old)


def _remove(path: Path) -> None:
    """Remove a file, a link (not what it leads to) or a folder, of which something may have to stay.

    NFS keeps what others have open. It goes with the next writer's leftovers.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _replace(temporary: Path, path: Path, outdated: Path | None) -> None:
    """Let a finished folder take its place, without `outdated`. If that fails, all is as before."""
    moving = [outdated] if outdated and os.path.lexists(outdated) else []
    if (
        path.is_dir() or path.is_symlink()
    ):  # rename replaces no link and no folder that holds something
        moving.append(path)
    aside: list[tuple[Path, Path]] = []
    try:
        for old in moving:
            away = old.parent / f".{old.name}.old.{os.getpid()}.partial"
            os.rename(old, away)
            aside.append((old, away))
        os.rename(temporary, path)
    except BaseException:
        for old, away in reversed(aside):
            with suppress(OSError):
                os.rename(away, old)
        raise
    for _, away in aside:
        with suppress(OSError):
            _remove(away)


@contextmanager
def whole(
    path: str | Path, folder: bool = False, outdated: str | Path | None = None
) -> Iterator[Path]:
    """Yield a temporary sibling of `path` to write to; on success it becomes `path`.

    With `folder`, the sibling is a new folder and replaces a folder at `path`, or a link to one;
    `outdated`, a file that speaks of the old one, goes at the same moment. On any error the sibling is
    removed and what was there stays as it was.
    """
    path = Path(os.path.abspath(path))  # `.` has no name
    path.parent.mkdir(parents=True, exist_ok=True)
    _clear_leftovers(path)
    temporary = path.parent / f".{path.name}.{os.getpid()}.partial"
    if folder:
        temporary.mkdir()
    try:
        yield temporary
        if folder:
            for sub in sorted(temporary.rglob("*"), reverse=True):
                _fsync(sub)
        _fsync(temporary)
        if folder:
            _replace(temporary, path, Path(outdated) if outdated else None)
        else:
            os.replace(temporary, path)
        _fsync(path.parent)
    except BaseException:
        with suppress(OSError):
            _remove(temporary)
        raise


@contextmanager
def scratch(path: str | Path) -> Iterator[Path]:
    """Yield a new folder beside `path` that is gone when the block ends.

    What killed processes left of it is removed by the next one that asks for the same path.
    """
    path = Path(os.path.abspath(path))  # `.` has no name
    path.parent.mkdir(parents=True, exist_ok=True)
    _clear_leftovers(path)
    folder = path.parent.resolve() / f".{path.name}.{os.getpid()}.partial"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_text(path: str | Path, text: str) -> None:
    """Write a text file whole or not at all."""
    with whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | Path, data: Any) -> None:
    """Write readable JSON whole or not at all; NaN is refused."""
    write_text(path, json.dumps(data, indent=2, allow_nan=False) + "\n")


def read_json(path: str | Path) -> Any:
    """Read JSON. Raises UserError naming the file when it is missing or damaged."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; run the stage that writes it") from None
    except (ValueError, RecursionError) as e:
        raise UserError(f"{path}: not JSON ({e}); delete it and run its stage again") from None


def read_settings(text: str) -> dict[str, Any]:
    """A stage's `--settings` or `--machine`: JSON itself, or the path of a JSON or YAML file."""
    if text.lstrip().startswith("{"):
        try:
            return json.loads(text)
        except ValueError as e:
            raise UserError(f"settings on the command line: not JSON ({e})") from None
    from dflash.config import read_yaml  # every JSON file is YAML

    return read_yaml(text)


def save_tensors(path: str | Path, tensors: dict[str, Any]) -> None:
    """Write a safetensors file. Raises UserError when the disk does not take it."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path = Path(path)
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(tensors, path, metadata={"format": "pt"})
        path.chmod(mode)  # safetensors lets the owner alone read, who need not be who serves it
    except SafetensorError as e:
        raise UserError(
            f"{path}: cannot be written ({e}); free space or set `results:` to another disk"
        ) from None


def sha256(*paths: str | Path) -> str:
    """Hash of the contents of files, in the order given."""
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as f:
            while block := f.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


def text_sha256(text: str) -> str:
    """Hash of a text's UTF-8 bytes."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def is_folder(model: str) -> bool:
    """Whether a model is named by a local folder rather than by a hub id."""
    return model.startswith(("/", "./", "../", "~"))
