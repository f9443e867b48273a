"""Published tasks, from made-up rows in the real layouts and columns of the data sets."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflash import config, corpus, tasks
from dflash.corpus import Prompt
from dflash.decode import Response
from dflash.errors import UserError
from dflash.target import load_tokenizer

# One file and two rows of each data set; columns that are not used stand for all the others.
LAYOUTS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "gsm8k": ("main/test-00000-of-00001.parquet", [{"question": "1+1?", "answer": "#### 2"}] * 2),
    "math500": (
        "test.jsonl",
        [{"problem": "Find $x$.", "subject": "Algebra", "level": 1, "answer": "0"}] * 2,
    ),
    "aime24": ("data/train-00000-of-00001.parquet", [{"id": 60, "problem": "A"}] * 2),
    "aime25": ("data/train-00000-of-00001.parquet", [{"problem_idx": 1, "problem": "B"}] * 2),
    "humaneval": (
        "openai_humaneval/test-00000-of-00001.parquet",
        [{"task_id": "HumanEval/0", "prompt": "def f():\n", "test": "..."}] * 2,
    ),
    "mbpp": (
        "sanitized/test-00000-of-00001.parquet",
        [{"task_id": 2, "prompt": "Write a function.", "code": "..."}] * 2,
    ),
    "livecodebench": (
        "test2.jsonl",
        [
            {"question_content": "Q", "starter_code": "", "difficulty": "easy"},
            {"question_content": "Q", "starter_code": "class S:", "difficulty": "hard"},
        ],
    ),
    "mt-bench": (
        "data/train-00000-of-00001-67c6c9fef07685a3.parquet",
        [{"prompt": ["How?", "And why?"], "prompt_id": 1, "category": "writing"}] * 2,
    ),
    "alpaca": (
        "data/train-00000-of-00001-a09b74b3ef9c3b56.parquet",
        [{"instruction": "Add", "input": "1 2"}, {"instruction": "Add", "input": ""}],
    ),
    "swe-bench-lite": (
        "data/test-00000-of-00001.parquet",
        [{"repo": "a/b", "problem_statement": "It fails."}] * 2,
    ),
}
STEPS = "\nPlease reason step by step, and put your final answer within \\boxed{}."


def write(folder: Path, name: str, rows: list[dict[str, Any]] | None = None) -> Path:
    file, own = LAYOUTS[name]
    path = folder / name / file
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = own if rows is None else rows
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / name


def asked(folder: Path, name: str, rows: int = 2) -> list[list[str]]:
    return [turns for _, _, turns in tasks.questions(tasks.DATASETS[name], folder, rows)]


def test_every_published_task_is_there():
    assert set(tasks.DATASETS) == set(get_args(config.Published)) == set(LAYOUTS)
    assert {name: d.rows for name, d in tasks.DATASETS.items()} == {
        **dict.fromkeys(("gsm8k", "math500", "mbpp", "livecodebench"), 128),
        **dict.fromkeys(("alpaca", "swe-bench-lite"), 128),
        **dict.fromkeys(("aime24", "aime25"), 30),
        **{"humaneval": 164, "mt-bench": 80},
    }


@pytest.mark.parametrize(
    ("name", "turns"),
    [
        ("gsm8k", ["1+1?" + STEPS]),
        ("math500", ["Find $x$." + STEPS]),
        ("aime24", ["A" + STEPS]),
        ("aime25", ["B" + STEPS]),
        (
            "humaneval",
            [
                "Write a solution to the following problem and make sure that it passes the tests:\n"
                "```python\ndef f():\n\n```"
            ],
        ),
        ("mbpp", ["Write a function."]),
        ("mt-bench", ["How?", "And why?"]),
        (
            "swe-bench-lite",
            ["Problem Statement:\nIt fails.\nPlease fix the issue described above."],
        ),
    ],
)
def test_prompt_forms(tmp_path, name, turns):
    assert asked(write(tmp_path, name), name) == [turns, turns]


def test_prompt_forms_that_depend_on_the_row(tmp_path):
    assert sorted(asked(write(tmp_path, "alpaca"), "alpaca")) == [["Add"], ["Add\n\nInput:\n1 2"]]
    code = sorted(turn for (turn,) in asked(write(tmp_path, "livecodebench"), "livecodebench"))
    assert code[0].endswith(
        "### Question:\nQ\n\n### Format: Use the following code structure:\n"
        "```python\nclass S:\n```\n\n### Answer: (use the provided format with backticks)"
    )
    assert "Write your code in the following format:\n```python\n# YOUR CODE HERE\n```" in code[1]
    assert all(c.startswith("You are an expert Python programmer.") for c in code)


def test_rows_are_the_official_choice(tmp_path):
    rows = [{"question": str(i)} for i in range(40)]
    order = list(range(40))
    random.Random(42).shuffle(order)
    found = asked(write(tmp_path, "gsm8k", rows), "gsm8k", 7)
    assert found == [[f"{i}{STEPS}"] for i in order[:7]]


def test_files_are_read_in_the_order_of_their_numbers(tmp_path):
    folder = tmp_path / "code"
    folder.mkdir()
    for number in ("", "2", "10"):
        (folder / f"test{number}.jsonl").write_text(json.dumps({"n": number}) + "\n")
    read = [row["n"] for _, row in tasks.read_rows(folder, "test*.jsonl")]
    assert read == ["", "2", "10"]


@pytest.mark.parametrize(
    ("name", "rows", "words"),
    [
        ("gsm8k", [{"question": ""}], "parquet, row 1: `question` is missing or empty"),
        ("math500", [{"problem": "A"}, {"text": "B"}], "test.jsonl, row 2: `problem` is missing"),
        ("math500", [], "holds no rows"),
        ("mt-bench", [{"prompt": ["How?", " "]}], "row 1: `prompt` is ' '"),
        ("mt-bench", [{"prompt": "How?"}], "row 1: `prompt`: expected a list of turns"),
    ],
)
def test_bad_rows_are_named(tmp_path, name, rows, words):
    with pytest.raises(UserError, match=words):
        asked(write(tmp_path, name, rows), name)


def test_bad_folders_are_named(tmp_path):
    with pytest.raises(UserError, match=r"holds no main/test-\*.parquet; give a folder laid out"):
        asked(tmp_path, "gsm8k")
    path = write(tmp_path, "gsm8k") / "main/test-00000-of-00001.parquet"
    path.write_bytes(b"PAR1")
    with pytest.raises(UserError, match="test-00000-of-00001.parquet: damaged"):
        asked(tmp_path / "gsm8k", "gsm8k")


def test_a_data_set_that_cannot_be_fetched(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match=r"openai/gsm8k@0+1 is not in the local cache and cannot"):
        tasks.fetch(tasks.DATASETS["gsm8k"], "0" * 39 + "1")


@pytest.fixture
def stage(tmp_path, tiny_llama, identity_file):
    def run(name: str, **settings: Any) -> list[Prompt]:
        out = tmp_path / f"{name}.parquet"
        given = {"dataset": name, "path": str(tmp_path / name), "max_new_tokens": 20} | settings
        args = ["--settings", json.dumps(given), "--identity", str(identity_file(tiny_llama))]
        tasks.main([*args, "--out", str(out)])
        return tasks.read_prompts(out)

    return run


def test_the_stage_writes_prompts_in_the_chat_form(tmp_path, stage, tiny_llama, identity_of):
    write(tmp_path, "mt-bench")
    first, second = stage("mt-bench")
    tokenizer = load_tokenizer(identity_of(tiny_llama))
    said = tokenizer.decode(first.prompt_ids)
    assert said == "<|im_start|>user\nHow?<|im_end|>\n<|im_start|>assistant\n<think></think>"
    assert (first.kind, first.later, first.turn) == ("writing", ("And why?",), 1)
    assert (first.id, second.id) == ("1", "2") and first.sample_id == second.sample_id
    assert stage("mt-bench", rows=1) == [first]


def test_prompts_too_long_for_the_target_are_left_out(tmp_path, stage, capsys):
    write(tmp_path, "mbpp", [{"prompt": "a " * 300}, {"prompt": "b"}])
    (kept,) = stage("mbpp")
    assert kept.messages[0]["content"] == "b" and "1 left out" in capsys.readouterr().out
    with pytest.raises(UserError, match="all 2 prompts are longer than 2 tokens"):
        stage("mbpp", max_new_tokens=510)


def test_later_turns_follow_the_answers_given(tmp_path, stage, tiny_llama, identity_of):
    write(tmp_path, "mt-bench")
    prompts = stage("mt-bench")
    tokenizer = load_tokenizer(identity_of(tiny_llama))
    answers = iter(["yes", "no", "1", "2"])

    def answer(asked: list[Prompt]) -> list[Response]:
        return [Response(tokenizer.encode(next(answers)) + [1]) for _ in asked]

    asked, given = tasks.converse(prompts, answer, tokenizer, False)
    assert [(p.id, p.turn) for p in asked] == [("1", 1), ("2", 1), ("1", 2), ("2", 2)]
    assert len(given) == 4 and asked[2].sample_id == asked[0].sample_id
    assert tokenizer.decode(asked[3].prompt_ids) == (
        "<|im_start|>user\nHow?<|im_end|>\n<|im_start|>assistant\nno<|im_end|>\n"
        "<|im_start|>user\nAnd why?<|im_end|>\n<|im_start|>assistant\n<think></think>"
    )


def test_language_is_stated_or_the_script():
    def language(text: str, stated: str = "") -> str:
        message = [{"role": "user", "content": text}]
        return tasks.language_of(Prompt("0", "s", "1", "k", "heldout", message, [1], stated))

    assert language("Hello, wörld 12") == "Latin script"
    assert language("Привет, world") == "Cyrillic script"
    assert language("請問 ok 怎麼做") == "Cjk script"
    assert language("1 + 1 =") == "no letters"
    assert language("Hello", "en") == "en"


def test_rows_of_a_file_may_state_their_language(tmp_path, tiny_llama, identity_of):
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps({"prompt": "a", "language": "de"}) + '\n{"prompt": "b"}\n')
    prompts, _ = corpus.load_jsonl_prompts(
        path,
        load_tokenizer(identity_of(tiny_llama)),
        source="own",
        max_prompt_tokens=99,
        enable_thinking=False,
    )
    assert [p.language for p in prompts] == ["de", ""]
    corpus.write_prompts(tmp_path / "own.parquet", prompts)  # the corpus stage's own columns
    assert [p.language for p in corpus.read_prompts(tmp_path / "own.parquet")] == ["", ""]
