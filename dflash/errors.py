"""Errors that are the user's to mend: one sentence, no traceback, exit status 2."""

from __future__ import annotations

import sys
from collections.abc import Callable


class UserError(Exception):
    """Says what was found (file, row, field), what was expected, and what to do."""


def entrypoint(main: Callable[[list[str] | None], None]) -> None:
    """Run a stage's `main`; turn a `UserError` and a refused file access into one clear line."""
    sys.stdout.reconfigure(line_buffering=True)  # also when piped: a log in the order things happen
    try:
        main(None)
    except (UserError, OSError) as e:
        said = sentence(e)
        if said is None:
            raise
        print(f"error: {said}", file=sys.stderr)
        raise SystemExit(2) from None


def sentence(e: BaseException) -> str | None:
    """What is told of an error that is the user's to mend; None for any other."""
    if isinstance(e, UserError):
        return str(e)
    if isinstance(e, OSError) and not (e.filename is None and e.errno is None):
        return explain_oserror(e)
    return None


def explain_oserror(e: OSError) -> str:
    """A file-system failure with its remedy: full, read-only, forbidden, missing."""
    import errno

    where = f" ({e.filename})" if e.filename else ""
    remedy = {
        errno.ENOSPC: "the disk is full: free space or set `results:` to another disk, then run again",
        errno.EDQUOT: "the disk quota is used up: free space or set `results:` elsewhere",
        errno.EROFS: "the file system is read-only: set `results:` to a folder you may write",
        errno.EACCES: "no permission: make the folder writable or set `results:` elsewhere",
        errno.EPERM: "not permitted: make the folder writable or set `results:` elsewhere",
        errno.ENOENT: "no such file: check the path in the settings",
        errno.ENOTDIR: "a file is in the way of a folder: choose another path",
        errno.EMFILE: "too many open files: raise the limit (ulimit -n)",
    }.get(e.errno or 0, e.strerror or str(e))
    return f"{remedy}{where}"
