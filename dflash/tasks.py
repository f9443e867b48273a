"""Stage `task`: the prompts of a published evaluation task, as the drafters of others are measured.

    python -m dflash.tasks --settings '{"dataset": "gsm8k", "max_new_tokens": 2048}' \\
        --identity results/target/identity.json --out results/tasks/gsm8k.parquet

The rows come from the hub at a pinned revision, or from a folder that is laid out like the data set
(`path`). They are read with pyarrow and json alone: no code of the hub runs. Prompt forms, counts of
rows and their choice (a shuffle with seed 42) are those of the official DFlash evaluation, so that
figures compare. Later turns of a conversation are asked after the answer that was really given.
"""

from __future__ import annotations

import argparse
import json
import random
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field
from transformers import PreTrainedTokenizerBase

from dflash import config
from dflash.chat import check_text, prompt_ids
from dflash.corpus import SCHEMA as CORPUS_SCHEMA
from dflash.corpus import Prompt, read_table, sample_id, write_prompts
from dflash.errors import UserError, entrypoint
from dflash.files import read_settings
from dflash.target import Identity, load_tokenizer, read_identity

SCHEMA = CORPUS_SCHEMA.append(pa.field("language", pa.string())).append(
    pa.field("later", pa.list_(pa.string()))
)
Row = dict[str, Any]


@dataclass(frozen=True)
class Dataset:
    """Where a published task's rows lie, and what is asked of them."""

    repo: str
    revision: str
    files: str  # pattern within the repository; all that match, in order of their numbers
    rows: int  # as published
    turns: Callable[[Row], list[str]]  # what the user says, turn by turn
    needs: tuple[str, ...]  # fields that every row must have
    kind: str | None = None  # field that names the kind of prompt
    perhaps: tuple[str, ...] = ()  # fields that a row may have

    @property
    def fields(self) -> tuple[str, ...]:
        """All fields that are read; LiveCodeBench's others take gigabytes."""
        return (*self.needs, *self.perhaps, *([self.kind] if self.kind else []))


STEP_BY_STEP = "\nPlease reason step by step, and put your final answer within \\boxed{}."
CODE_ROLE = (
    "You are an expert Python programmer. You will be given a question (problem specification) and "
    "will generate a correct Python program that matches the specification and passes all tests. You "
    "will NOT return anything except for the program"
)


def _livecodebench(row: Row) -> list[str]:
    given = row.get("starter_code")
    form = (
        "Use the following code structure" if given else "Write your code in the following format"
    )
    return [
        f"{CODE_ROLE}\n\n### Question:\n{row['question_content']}\n\n### Format: {form}:\n"
        f"```python\n{given or '# YOUR CODE HERE'}\n```\n\n"
        "### Answer: (use the provided format with backticks)"
    ]


def _alpaca(row: Row) -> list[str]:
    return [row["instruction"] + (f"\n\nInput:\n{row['input']}" if row.get("input") else "")]


# Prompt forms: the official evaluation's, word for word. Revisions: the newest known when this was
# written. AIME, HumanEval and MT-Bench are taken whole.
DATASETS = {
    "gsm8k": Dataset(
        "openai/gsm8k",
        "740312add88f781978c0658806c59bc2815b9866",
        "main/test-*.parquet",
        128,
        lambda row: [row["question"] + STEP_BY_STEP],
        ("question",),
    ),
    "math500": Dataset(
        "HuggingFaceH4/MATH-500",
        "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be",
        "test.jsonl",
        128,
        lambda row: [row["problem"] + STEP_BY_STEP],
        ("problem",),
        "subject",
    ),
    "aime24": Dataset(
        "HuggingFaceH4/aime_2024",
        "2fe88a2f1091d5048c0f36abc874fb997b3dd99a",
        "data/train-*.parquet",
        30,
        lambda row: [row["problem"] + STEP_BY_STEP],
        ("problem",),
    ),
    "aime25": Dataset(
        "MathArena/aime_2025",
        "c94da77eb22bbd6439e62a323bec18493a421302",
        "data/train-*.parquet",
        30,
        lambda row: [row["problem"] + STEP_BY_STEP],
        ("problem",),
    ),
    "humaneval": Dataset(
        "openai/openai_humaneval",
        "7dce6050a7d6d172f3cc5c32aa97f52fa1a2e544",
        "openai_humaneval/test-*.parquet",
        164,
        lambda row: [
            "Write a solution to the following problem and make sure that it passes the tests:\n"
            f"```python\n{row['prompt']}\n```"
        ],
        ("prompt",),
    ),
    "mbpp": Dataset(
        "google-research-datasets/mbpp",
        "4bb6404fdc6cacfda99d4ac4205087b89d32030c",
        "sanitized/test-*.parquet",
        128,
        lambda row: [row["prompt"]],
        ("prompt",),
    ),
    "livecodebench": Dataset(
        "livecodebench/code_generation_lite",
        "0fe84c3912ea0c4d4a78037083943e8f0c4dd505",
        "test*.jsonl",
        128,
        _livecodebench,
        ("question_content",),
        "difficulty",
        ("starter_code",),
    ),
    "mt-bench": Dataset(
        "HuggingFaceH4/mt_bench_prompts",
        "e3a795c5e9a82ee40611c416b8a7786c73198991",
        "data/train-*.parquet",
        80,
        lambda row: row["prompt"],
        ("prompt",),
        "category",
    ),
    "alpaca": Dataset(
        "tatsu-lab/alpaca",
        "dce01c9b08f87459cf36a430d809084718273017",
        "data/train-*.parquet",
        128,
        _alpaca,
        ("instruction",),
        perhaps=("input",),
    ),
    "swe-bench-lite": Dataset(
        "princeton-nlp/SWE-bench_Lite",
        "6ec7bb89b9342f664a54a6e0a6ea6501d3437cc2",
        "data/test-*.parquet",
        128,
        lambda row: [
            f"Problem Statement:\n{row['problem_statement']}\nPlease fix the issue described above."
        ],
        ("problem_statement",),
        "repo",
    ),
}


# --- reading a data set -------------------------------------------------------------------------


def fetch(dataset: Dataset, revision: str) -> Path:
    """The folder of a data set's files in the hub's cache. Raises UserError when it has to be
    fetched and cannot be."""
    from huggingface_hub import snapshot_download

    print(
        f"task: fetching {dataset.repo}@{revision} (or finding it in the local cache)", flush=True
    )
    try:
        return Path(
            snapshot_download(
                dataset.repo,
                repo_type="dataset",
                revision=revision,
                allow_patterns=[dataset.files],
            )
        )
    except Exception as e:  # offline, refused, no such revision: all end in the same remedy
        raise UserError(
            f"task: {dataset.repo}@{revision} is not in the local cache and cannot be fetched "
            f"({type(e).__name__}); connect to the hub, or give `path`, a folder with its "
            f"{dataset.files}"
        ) from None


def read_rows(folder: Path, files: str, fields: tuple[str, ...]) -> Iterator[tuple[str, Row]]:
    """These fields of every row of the files that match, with its place. Raises UserError when there
    are no files."""
    found = sorted(folder.glob(files), key=lambda path: (len(path.name), path.name))
    if not found:
        raise UserError(f"{folder}: holds no {files}; give a folder laid out like the data set")
    for path in found:
        for number, row in _rows(path, fields):
            if not isinstance(row, dict):
                raise UserError(
                    f"{path}, row {number}: found a {type(row).__name__}, not an object"
                )
            yield f"{path}, row {number}", {f: row[f] for f in fields if f in row}


def _rows(path: Path, fields: tuple[str, ...]) -> Iterator[tuple[int, Row]]:
    """Row or line number, from 1, and row."""
    try:
        if path.suffix == ".parquet":
            file = pq.ParquetFile(path)
            columns = [name for name in fields if name in file.schema_arrow.names]
            batches = file.iter_batches(columns=columns)
            yield from enumerate((row for batch in batches for row in batch.to_pylist()), start=1)
        else:
            with open(path, encoding="utf-8") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        yield number, json.loads(line)
    except (pa.ArrowException, ValueError) as e:
        reason = " ".join(str(e).split())[:120]
        raise UserError(f"{path}: damaged ({reason}); fetch it again") from None


def questions(dataset: Dataset, folder: Path, rows: int) -> list[tuple[str, Row, list[str]]]:
    """The chosen rows with their places and what is asked. Raises UserError naming file, row and
    field where one is missing, and when there are no rows at all."""
    every = list(read_rows(folder, dataset.files, dataset.fields))
    if not every:
        raise UserError(f"{folder}: {dataset.files} holds no rows; fetch it again")
    order = list(range(len(every)))
    random.Random(42).shuffle(order)  # the official package's choice
    chosen = []
    for where, row in (every[i] for i in order[:rows]):
        for field in dataset.needs:
            if not row.get(field):
                raise UserError(
                    f"{where}: `{field}` is missing or empty; expected the columns of {dataset.repo}"
                )
        turns = dataset.turns(row)
        if not isinstance(turns, list):
            raise UserError(f"{where}: `{dataset.needs[0]}`: expected a list of turns")
        turns = [check_text(turn, dataset.needs[0], where) for turn in turns]
        chosen.append((where, row, turns))
    return chosen


# --- prompts ------------------------------------------------------------------------------------


def make_prompts(
    name: str,
    dataset: Dataset,
    folder: Path,
    rows: int,
    tokenizer: PreTrainedTokenizerBase,
    enable_thinking: bool,
    longest: int,
) -> tuple[list[Prompt], int]:
    """The prompts of a task in their order, and how many were left out as longer than `longest`.

    There is no system prompt, and equal prompts stay: both as published.
    """
    prompts = []
    chosen = questions(dataset, folder, rows)
    for number, (where, row, turns) in enumerate(chosen, start=1):
        messages = [{"role": "user", "content": turns[0]}]
        ids = prompt_ids(tokenizer, messages, enable_thinking, where)
        if len(ids) > longest:
            continue
        prompts.append(
            Prompt(
                sample_id=sample_id([{"role": "user", "content": turn} for turn in turns]),
                source=name,
                id=str(number),
                kind=str(row[dataset.kind]) if dataset.kind and row.get(dataset.kind) else name,
                split="heldout",
                messages=messages,
                prompt_ids=ids,
                later=tuple(turns[1:]),
            )
        )
    if not prompts:
        raise UserError(
            f"task {name}: all {len(chosen)} prompts are longer than {longest} tokens, what the "
            "target's context leaves beside the response; lower the task's `max_new_tokens`"
        )
    return prompts, len(chosen) - len(prompts)


def follow_up(
    prompt: Prompt,
    answer: list[int],
    tokenizer: PreTrainedTokenizerBase,
    enable_thinking: bool,
) -> Prompt:
    """The next turn of a conversation, asked after this answer (token ids)."""
    said = tokenizer.decode(answer, skip_special_tokens=True)
    messages = [
        *prompt.messages,
        {"role": "assistant", "content": said},
        {"role": "user", "content": prompt.later[0]},
    ]
    ids = prompt_ids(tokenizer, messages, enable_thinking, f"turn {prompt.turn + 1} of {prompt.id}")
    return replace(
        prompt, messages=messages, prompt_ids=ids, later=prompt.later[1:], turn=prompt.turn + 1
    )


Answer = TypeVar("Answer", bound="HasTokens")


class HasTokens(Protocol):
    tokens: list[int]


def converse(
    prompts: list[Prompt],
    answer: Callable[[list[Prompt]], list[Answer]],
    tokenizer: PreTrainedTokenizerBase | None,
    enable_thinking: bool,
) -> tuple[list[Prompt], list[Answer]]:
    """Every prompt with its answer; later turns stand after all earlier ones.

    `tokenizer` is needed only where a prompt has later turns.
    """
    asked: list[Prompt] = []
    given: list[Answer] = []
    while prompts:
        answers = answer(prompts)
        asked, given = asked + prompts, given + answers
        prompts = [
            follow_up(p, a.tokens, tokenizer, enable_thinking)
            for p, a in zip(prompts, answers, strict=True)
            if p.later
        ]
    return asked, given


def language_of(prompt: Prompt) -> str:
    """The language a row states, or else the script of most letters of what the user says."""
    if prompt.language:
        return prompt.language
    text = "".join(m["content"] for m in prompt.messages if m["role"] == "user")
    scripts = Counter(unicodedata.name(c, "other").split()[0] for c in text if c.isalpha())
    return f"{scripts.most_common(1)[0][0].title()} script" if scripts else "no letters"


def read_prompts(path: str | Path) -> list[Prompt]:
    """Prompts as this stage wrote them. Raises UserError when missing or damaged."""
    rows = read_table(path, SCHEMA, "task").to_pylist()
    return [
        Prompt(**{**row, "messages": json.loads(row["messages"]), "later": tuple(row["later"])})
        for row in rows
    ]


# --- the stage ----------------------------------------------------------------------------------


class StageSettings(config.Settings):
    """What `config.stage_settings` hands to this stage."""

    stage: Literal["task"] = "task"
    version: int = 1
    dataset: config.Published
    path: config.UserPath | None = None
    revision: str | None = None
    rows: int | None = Field(None, ge=1)
    max_new_tokens: int = Field(2048, ge=1)
    enable_thinking: bool = False
    trust_remote_code: bool = False


def main(argv: list[str] | None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m dflash.tasks", description="Read the prompts of a published task."
    )
    parser.add_argument("--settings", required=True, help="JSON, or a JSON or YAML file")
    parser.add_argument("--identity", required=True, help="identity.json of the target stage")
    parser.add_argument("--out", required=True, type=Path, help="Parquet file to write")
    args = parser.parse_args(argv)
    s = config.check(StageSettings, read_settings(args.settings), "--settings")
    identity: Identity = read_identity(args.identity)
    dataset, name = DATASETS[s.dataset], args.out.stem
    revision = s.revision or dataset.revision
    prompts, too_long = make_prompts(
        name,
        dataset,
        Path(s.path) if s.path else fetch(dataset, revision),
        s.rows or dataset.rows,
        load_tokenizer(identity, s.trust_remote_code),
        s.enable_thinking,
        identity.max_position_embeddings - s.max_new_tokens,
    )
    write_prompts(args.out, prompts, SCHEMA)
    print(
        f"task {name}: {len(prompts)} prompts of {s.path or f'{dataset.repo}@{revision}'}, {too_long} "
        "left out as longer than the target's context allows"
    )


if __name__ == "__main__":
    entrypoint(main)
