"""Stage `corpus`: one source's prompts, checked, without duplicates, split and tokenised.

    python -m dflash.corpus --settings JSON --identity results/target/identity.json \\
        --out results/corpus/NAME.parquet --stats results/corpus/NAME.json

A prompt is the conversation up to where the assistant answers. It is tokenised here, once; every
later stage takes the ids from the Parquet file. A prompt's id is a hash of its messages, and its
split is a hash of that id, so neither depends on the other rows.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerBase

from dflash.chat import Message, as_prompt, check_messages, check_text, prompt_ids
from dflash.config import Corpus, Settings, Source, canonical, check
from dflash.errors import UserError
from dflash.files import read_settings, text_sha256, whole, write_json
from dflash.progress import progress
from dflash.target import load_tokenizer, read_identity

SCHEMA = pa.schema(
    [
        ("sample_id", pa.string()),
        ("source", pa.string()),
        ("id", pa.string()),
        ("kind", pa.string()),
        ("split", pa.string()),
        ("messages", pa.string()),  # JSON
        ("prompt_ids", pa.list_(pa.int32())),
    ]
)


@dataclass(frozen=True)
class Prompt:
    """A conversation that the target is to answer."""

    sample_id: str  # 16 hex digits: a hash of the messages
    source: str
    id: str  # the row's own id, or its number
    kind: str
    split: str  # "train" or "heldout"
    messages: list[Message]
    prompt_ids: list[int]
    language: str = ""  # if a task's row states it
    later: tuple[str, ...] = ()  # user turns of a task still to be asked, after the answer
    turn: int = 1


@dataclass(frozen=True)
class Counts:
    """What became of the rows of a file."""

    rows: int
    kept: int
    duplicates: int
    too_long: int
    trailing_replies_dropped: int


# --- hashes that decide -------------------------------------------------------------------------


def sample_id(messages: list[Message]) -> str:
    """The id of a prompt, a function of its messages alone."""
    return text_sha256(canonical(messages))[:16]


def split_of(sample: str, heldout_share: float) -> str:
    """ "heldout" for about that share of all ids, else "train"; never depends on other prompts."""
    fraction = int(text_sha256("heldout/" + sample)[:16], 16) / 16**16
    return "heldout" if fraction < heldout_share else "train"


def select_per_kind(prompts: list[Prompt], n: int | None) -> list[Prompt]:
    """Of each kind the `n` prompts (all if None) with the smallest hash, ordered by kind and hash.

    Adding prompts can push a selected one out of its kind, but never reorders those that stay.
    """

    def rank(p: Prompt) -> str:
        return text_sha256("select/" + p.sample_id)

    kinds = sorted({p.kind for p in prompts})
    return [
        p for kind in kinds for p in sorted((p for p in prompts if p.kind == kind), key=rank)[:n]
    ]


# --- reading JSONL ------------------------------------------------------------------------------


def load_jsonl_prompts(
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    source: str,
    max_prompt_tokens: int,
    enable_thinking: bool,
    heldout_share: float = 1.0,
    limit: int | None = None,
) -> tuple[list[Prompt], Counts]:
    """The prompts of a JSONL file in its order, without repeats and without too long ones.

    `source` names the file in the result and is the kind of rows that state none. With the default
    share every prompt is held out, as the prompts of an evaluation task are. Raises UserError
    naming file, row and remedy for anything that is not a proper row, and when no prompt is left.
    """
    prompts: dict[str, tuple[Prompt, str]] = {}  # sample id -> prompt without ids, its place
    rows = replies = too_long = 0
    for number, row in islice(_rows(Path(path)), limit):
        where = f"{path}, row {number}"
        rows += 1
        messages, dropped = as_prompt(_messages(row, where))
        replies += dropped
        sample = sample_id(messages)
        prompt = Prompt(
            sample_id=sample,
            source=source,
            id=_label(row, "id", str(number), where),
            kind=_label(row, "kind", source, where),
            split=split_of(sample, heldout_share),
            messages=messages,
            prompt_ids=[],
            language=_label(row, "language", "", where),
        )
        prompts.setdefault(sample, (prompt, where))
    if not rows:
        raise UserError(f"{path}: holds no rows; expected JSONL, a prompt a line")

    kept = []
    for prompt, where in progress(prompts.values(), desc=f"corpus {source}", unit="prompts"):
        ids = prompt_ids(tokenizer, prompt.messages, enable_thinking, where)
        too_long += len(ids) > max_prompt_tokens
        if len(ids) <= max_prompt_tokens:
            kept.append(replace(prompt, prompt_ids=ids))
    if not kept:
        raise UserError(
            f"{path}: all {too_long} prompts are longer than {max_prompt_tokens} tokens; raise "
            "`corpus.max_prompt_tokens`"
        )
    return kept, Counts(rows, len(kept), rows - len(prompts), too_long, replies)


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number (from 1) and object of each line that is not blank."""
    try:
        file = open(path, "rb")
    except OSError as e:
        raise UserError(
            f"{path}: cannot be read ({e.strerror}); check the path in the settings (it is "
            "relative to the working folder)"
        ) from None
    with file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, _row(line, f"{path}, row {number}")


def _row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig"))  # some editors put a mark at a file's start
    except UnicodeDecodeError as e:
        raise UserError(
            f"{where}: not UTF-8 at byte {e.start + 1} (0x{line[e.start]:02x}); save the file as "
            "UTF-8"
        ) from None
    except json.JSONDecodeError as e:
        raise UserError(
            f"{where}, column {e.colno}: not JSON ({e.msg}); correct or remove the row"
        ) from None
    except (ValueError, RecursionError) as e:
        raise UserError(f"{where}: not JSON ({e}); correct or remove the row") from None
    if not isinstance(row, dict):
        raise UserError(
            f"{where}: found a {type(row).__name__}; expected an object with `prompt` or `messages`"
        )
    return row


def _messages(row: dict[str, Any], where: str) -> list[Message]:
    """The row's conversation; null counts as absent, other keys than the two are free."""
    given = [key for key in ("prompt", "messages") if row.get(key) is not None]
    if len(given) != 1:
        raise UserError(
            f"{where}: has {'both' if given else 'neither'} of `prompt` and `messages`; expected "
            "exactly one of them; correct or remove the row"
        )
    if given == ["messages"]:
        return check_messages(row["messages"], where)
    return [{"role": "user", "content": check_text(row["prompt"], "prompt", where)}]


def _label(row: dict[str, Any], key: str, default: str, where: str) -> str:
    """The row's optional `id`, `kind` or `language`, as text."""
    value = row.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise UserError(f"{where}: `{key}` is {value!r}; expected a string or a whole number")
    return check_text(str(value), key, where)


# --- the prompts file ---------------------------------------------------------------------------


def write_prompts(path: Path, prompts: list[Prompt], schema: pa.Schema = SCHEMA) -> None:
    """Write the schema's fields of prompts as Parquet, whole or not at all; equal prompts give equal
    bytes."""
    rows = [{**asdict(p), "messages": canonical(p.messages)} for p in prompts]
    with whole(path) as temporary:
        pq.write_table(pa.Table.from_pylist(rows, schema), temporary, compression="zstd")


def read_prompts(path: str | Path) -> list[Prompt]:
    """Prompts as the corpus stage wrote them. Raises UserError when missing or damaged."""
    rows = read_table(path, SCHEMA, "corpus").to_pylist()
    return [Prompt(**{**row, "messages": json.loads(row["messages"])}) for row in rows]


def read_table(
    path: str | Path, schema: pa.Schema, stage: str, columns: list[str] | None = None
) -> pa.Table:
    """A Parquet file that a stage wrote, or some columns of it. Raises UserError when missing,
    damaged or different."""
    try:
        found = pq.read_schema(path)
        table = None
        if found.equals(schema):
            # a folder `a=b` adds no column
            table = pq.read_table(path, columns=columns, partitioning=None)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; run the {stage} stage") from None
    except (pa.ArrowException, OSError) as e:
        reason = " ".join(str(e).split())[:120]
        raise UserError(
            f"{path}: damaged ({reason}); delete it and run the {stage} stage again"
        ) from None
    if table is None:
        raise UserError(
            f"{path}: columns {found.names} are not those the {stage} stage writes "
            f"({schema.names}); delete it and run that stage again"
        )
    return table


# --- the stage ----------------------------------------------------------------------------------


class StageSettings(Settings):
    """What `config.stage_settings` hands to this stage."""

    stage: Literal["corpus"]
    version: int
    source: Source
    corpus: Corpus
    trust_remote_code: bool = False


def _statistics(prompts: list[Prompt], counts: Counts) -> dict[str, Any]:
    kinds = {}
    for split in ("train", "heldout"):
        found = [p.kind for p in prompts if p.split == split]
        kinds[split] = {kind: found.count(kind) for kind in sorted(set(found))}
    tokens = sum(len(p.prompt_ids) for p in prompts)
    return {**asdict(counts), "mean_prompt_tokens": tokens / len(prompts), "kinds": kinds}


def _report(name: str, limit: int, stats: dict[str, Any]) -> None:
    print(
        f"corpus {name}: {stats['rows']} rows, {stats['kept']} prompts kept, "
        f"{stats['duplicates']} duplicates left out, {stats['too_long']} longer than {limit} "
        f"tokens left out, {stats['trailing_replies_dropped']} given replies not used, "
        f"{stats['mean_prompt_tokens']:.1f} tokens a prompt"
    )
    for split, kinds in stats["kinds"].items():
        listed = ", ".join(f"{kind} {n}" for kind, n in kinds.items())
        print(f"corpus {name}: {split} {sum(kinds.values())} ({listed or 'none'})")


def main(argv: list[str] | None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m dflash.corpus",
        description="Check, split and tokenise one source's prompts.",
    )
    parser.add_argument("--settings", required=True, help="JSON, or a JSON or YAML file")
    parser.add_argument("--identity", required=True, help="identity.json of the target stage")
    parser.add_argument("--out", required=True, type=Path, help="Parquet file to write")
    parser.add_argument("--stats", required=True, type=Path, help="JSON file of counts to write")
    args = parser.parse_args(argv)
    settings = check(StageSettings, read_settings(args.settings), "--settings")
    source, corpus = settings.source, settings.corpus
    prompts, counts = load_jsonl_prompts(
        source.path,
        load_tokenizer(read_identity(args.identity), settings.trust_remote_code),
        source=source.name,
        max_prompt_tokens=corpus.max_prompt_tokens,
        enable_thinking=corpus.enable_thinking,
        heldout_share=corpus.heldout_share,
        limit=source.limit,
    )
    stats = _statistics(prompts, counts)
    write_prompts(args.out, prompts)
    write_json(args.stats, stats)
    _report(source.name, corpus.max_prompt_tokens, stats)


if __name__ == "__main__":
    from dflash.errors import entrypoint

    entrypoint(main)
