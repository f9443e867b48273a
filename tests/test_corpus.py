"""dflash.corpus: rows become prompts, every fault is named, hashes decide splits and selections."""

import hashlib
import json
import os
import subprocess
import sys
from collections import Counter

import pyarrow.parquet as pq
import pytest
from support.targets import START

from dflash import corpus
from dflash.chat import prompt_ids
from dflash.errors import UserError
from dflash.target import load_tokenizer


def question(n):
    return {"prompt": f"What is {n} times {n}?"}


def user(text):
    return {"role": "user", "content": text}


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.fixture(scope="session")
def tokenizer(tiny_llama, identity_of):
    return load_tokenizer(identity_of(tiny_llama))


@pytest.fixture
def load(tmp_path, tokenizer):
    """A function: content of a JSONL file -> prompts and counts."""

    def run(content, **options):
        path = tmp_path / "data.jsonl"
        path.write_bytes(content)
        defaults = dict(source="src", max_prompt_tokens=1000, enable_thinking=True)
        return corpus.load_jsonl_prompts(path, tokenizer, **{**defaults, **options})

    return run


@pytest.fixture
def arguments(tmp_path, tiny_llama, identity_file):
    """A function: content of a JSONL file -> arguments of the stage (and the file's path)."""

    def make(content, limit=None, **options):
        path = tmp_path / "data.jsonl"
        if content is not None:
            path.write_bytes(content)
        settings = {
            "stage": "corpus",
            "version": 1,
            "source": {"name": "src", "path": str(path), "limit": limit},
            "corpus": {"heldout_share": 0.3, "max_prompt_tokens": 1000, **options},
        }
        return [
            *("--settings", json.dumps(settings), "--identity", str(identity_file(tiny_llama))),
            *("--out", str(tmp_path / "out" / "src.parquet")),
            *("--stats", str(tmp_path / "out" / "src.json")),
        ]

    return make


# --- rows to prompts ----------------------------------------------------------------------------


def test_prompt_and_messages_are_the_same_prompt(load, tokenizer):
    content = lines(
        {"prompt": "Why?", "id": "a-1", "kind": "short", "license": "x"},
        {"messages": [user("Why not?"), {"role": "assistant", "content": "So."}], "prompt": None},
        {"messages": [user("Why?")]},
    )
    prompts, counts = load(content)
    assert counts == corpus.Counts(3, 2, duplicates=1, too_long=0, trailing_replies_dropped=1)
    first, second = prompts
    assert (first.id, first.kind, first.source, first.split) == ("a-1", "short", "src", "heldout")
    assert (second.id, second.kind) == ("2", "src")
    assert first.messages == [user("Why?")] and second.messages == [user("Why not?")]
    for p in prompts:
        assert p.prompt_ids == prompt_ids(tokenizer, p.messages, enable_thinking=True)
        assert len(p.sample_id) == 16 and int(p.sample_id, 16) >= 0


def test_enable_thinking_reaches_the_ids(load, tokenizer):
    (prompt,), _ = load(lines(question(1)), enable_thinking=False)
    assert tokenizer.decode(prompt.prompt_ids).endswith("<think></think>")


def test_the_sample_id_is_pinned():
    """Splits, selections and anchors of all runs hang on it."""
    messages = [user("Why is the sky blue during the day but red at sunset?")]
    assert corpus.sample_id(messages) == "dc80eca85ef60efa"
    assert corpus.split_of("dc80eca85ef60efa", 0.2) == "train"


def test_blank_lines_are_no_rows_but_count_as_lines(load):
    content = b"\xef\xbb\xbf" + lines(question(1)) + b"\n  \r\n" + lines(question(2))
    prompts, counts = load(content)
    assert [p.id for p in prompts] == ["1", "4"] and counts.rows == 2


def test_a_line_separator_in_a_text_does_not_end_the_row(load):
    (prompt,), _ = load('{"prompt": "one\u2028two\u0085three"}'.encode())
    assert prompt.messages[0]["content"] == "one\u2028two\u0085three"


def test_limit_reads_only_the_first_rows(load):
    content = lines(question(1), question(2)) + b"never read"
    assert [p.id for p in load(content, limit=2)[0]] == ["1", "2"]


def test_too_long_prompts_are_counted(load):
    rows = [question(1), {"prompt": "long " * 100}, question(2)]
    prompts, counts = load(lines(*rows), max_prompt_tokens=60)
    assert [p.id for p in prompts] == ["1", "3"]
    assert (counts.too_long, counts.kept) == (1, 2)
    longest = max(len(p.prompt_ids) for p in prompts)
    assert load(lines(question(1), question(2)), max_prompt_tokens=longest)[1].too_long == 0
    with pytest.raises(UserError, match=r"all 1 prompts are longer than 9 tokens; raise `corpus.m"):
        load(lines(question(1)), max_prompt_tokens=9)


# --- splits and selections ----------------------------------------------------------------------


def test_splits_do_not_move_when_rows_are_added(load):
    few, _ = load(lines(*map(question, range(100))), heldout_share=0.3)
    more, _ = load(lines(*map(question, range(400, 0, -1))), heldout_share=0.3)
    splits = {p.sample_id: p.split for p in more}
    shared = [p for p in few if p.sample_id in splits]
    assert len(shared) == 99 and all(p.split == splits[p.sample_id] for p in shared)
    share = Counter(splits.values())["heldout"] / len(splits)
    assert 0.22 < share < 0.38  # 400 draws at 0.3: three standard deviations and a bit


def test_a_larger_share_only_adds_to_the_held_out(load):
    content = lines(*map(question, range(100)))
    held = [
        {p.sample_id for p in load(content, heldout_share=share)[0] if p.split == "heldout"}
        for share in (0.0, 0.2, 0.5, 1.0)
    ]
    assert held[0] == set() and held[0] < held[1] < held[2] < held[3] and len(held[3]) == 100


def test_selection_is_stable_and_per_kind(load):
    rows = [{**question(n), "kind": "even" if n % 2 == 0 else "odd"} for n in range(40)]
    prompts, _ = load(lines(*rows))
    chosen = corpus.select_per_kind(prompts, 5)
    assert [p.kind for p in chosen] == ["even"] * 5 + ["odd"] * 5
    assert corpus.select_per_kind(prompts[::-1], 5) == chosen
    assert [p for p in corpus.select_per_kind(prompts, 6) if p in chosen] == chosen
    assert len(corpus.select_per_kind(prompts, None)) == 40
    hashed = sorted(
        (hashlib.sha256(f"select/{p.sample_id}".encode()).hexdigest(), p.sample_id)
        for p in prompts
        if p.kind == "even"
    )
    assert [p.sample_id for p in chosen[:5]] == [sample for _, sample in hashed[:5]]


# --- the stage ----------------------------------------------------------------------------------


def test_the_stage_writes_prompts_and_counts(arguments, tmp_path, load, capsys):
    rows = [{**question(n), "kind": "even" if n % 2 == 0 else "odd"} for n in range(30)]
    reply = {"role": "assistant", "content": "25"}
    content = lines(*rows, {"messages": [user("What is 5 times 5?"), reply]})
    argv = arguments(content)
    corpus.main(argv)
    out, stats = (
        tmp_path / "out" / "src.parquet",
        json.loads((tmp_path / "out/src.json").read_text()),
    )

    prompts = corpus.read_prompts(out)
    expected, _ = load(content, heldout_share=0.3, enable_thinking=False)
    assert prompts == expected
    assert Counter(p.split for p in prompts)["heldout"] == sum(stats["kinds"]["heldout"].values())
    assert Counter(p.kind for p in prompts if p.split == "train") == stats["kinds"]["train"]
    assert {k: v for k, v in stats.items() if isinstance(v, int)} == {
        "rows": 31,
        "kept": 30,
        "duplicates": 1,
        "too_long": 0,
        "trailing_replies_dropped": 1,
    }
    mean = sum(len(p.prompt_ids) for p in prompts) / 30
    assert stats["mean_prompt_tokens"] == pytest.approx(mean)
    said = capsys.readouterr().out
    assert "31 rows, 30 prompts kept, 1 duplicates left out" in said
    assert f"train {sum(stats['kinds']['train'].values())} (even " in said

    before = out.read_bytes()
    corpus.main(argv)
    assert out.read_bytes() == before
    assert pq.read_schema(out).field("prompt_ids").type.value_type == "int32"


FAULTS = {
    "missing file": (
        None,
        "data.jsonl: cannot be read (No such file or directory); check the path",
    ),
    "empty file": (b"", "data.jsonl: holds no rows; expected JSONL, a prompt a line"),
    "only blank lines": (b"\n \n", "data.jsonl: holds no rows"),
    "JSON error in line 17": (
        lines(*map(question, range(16))) + b'{"prompt": "a" "b"}\n' + lines(question(17)),
        "data.jsonl, row 17, column 16: not JSON (Expecting ',' delimiter); correct or remove",
    ),
    "broken off": (lines(question(1)) + b'{"prompt": "ab', "row 2, column 12: not JSON (Untermin"),
    "nested without end": (b"[" * 100000, "row 1"),
    "not UTF-8": (
        lines(question(1)) + b'{"prompt": "caf\xe9"}\n',
        "row 2: not UTF-8 at byte 16 (0xe9)",
    ),
    "a list": (b"[1]\n", "row 1: found a list; expected an object with `prompt` or `messages`"),
    "a text": (b'"hello"\n', "row 1: found a str; expected an object"),
    "neither": (lines({"text": "a"}), "row 1: has neither of `prompt` and `messages`; expected"),
    "both": (lines({"prompt": "a", "messages": [user("a")]}), "row 1: has both of `prompt` and"),
    "prompt is empty": (
        lines(question(1), {"prompt": ""}),
        "row 2: `prompt` is ''; expected a str",
    ),
    "prompt is a number": (lines({"prompt": 5}), "row 1: `prompt` is 5; expected a string"),
    "message without content": (
        lines(question(1), question(2), {"messages": [user("a"), {"role": "assistant"}]}),
        "data.jsonl, row 3, message 2: has no `content`; add it or remove the row",
    ),
    "unknown role": (
        lines({"messages": [{"role": "human", "content": "a"}]}),
        "data.jsonl, row 1, message 1: role 'human' is unknown; allowed: system, user, assistant",
    ),
    "no user": (lines({"messages": [{"role": "system", "content": "a"}]}), "row 1: no message of"),
    "kind is a list": (lines({"prompt": "a", "kind": ["x"]}), "row 1: `kind` is ['x']; expected"),
    "id is true": (lines({"prompt": "a", "id": True}), "row 1: `id` is True; expected a string"),
    "roles do not alternate": (
        lines(question(1), {"messages": [user("a"), user("b")]}),
        "data.jsonl, row 2: the target's chat template refuses this conversation (roles must alt",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_ends_in_one_sentence_and_no_file(fault, arguments, refusal, tmp_path):
    content, says = FAULTS[fault]
    said = refusal(corpus.main, *arguments(content))
    assert says in said and str(tmp_path / "data.jsonl") in said
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def test_all_too_long_is_refused(arguments, refusal):
    said = refusal(corpus.main, *arguments(lines(question(1)), max_prompt_tokens=3))
    assert "all 1 prompts are longer than 3 tokens" in said


def test_a_fault_does_not_touch_the_older_output(arguments, refusal, tmp_path):
    corpus.main(arguments(lines(question(1))))
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    refusal(corpus.main, *arguments(b"nonsense"))
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize(
    ("number", "says"), [(28, "the disk is full: free space"), (30, "the file system is read-only")]
)
def test_a_full_or_read_only_results_folder(
    number, says, arguments, refusal, tmp_path, monkeypatch
):
    def refuse(table, where, **options):
        where.write_bytes(b"half")
        raise OSError(number, os.strerror(number), str(where))

    monkeypatch.setattr(pq, "write_table", refuse)
    assert says in refusal(corpus.main, *arguments(lines(question(1))))
    assert list((tmp_path / "out").iterdir()) == []


def test_the_command_itself_ends_with_status_2_and_one_line(arguments):
    command = [sys.executable, "-m", "dflash.corpus", *arguments(b"nonsense")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("error: ")


def test_read_prompts_of_a_missing_damaged_or_foreign_file(arguments, tmp_path):
    with pytest.raises(UserError, match="x.parquet: no such file; run the corpus stage"):
        corpus.read_prompts(tmp_path / "x.parquet")
    corpus.main(arguments(lines(question(1))))
    out = tmp_path / "out" / "src.parquet"
    os.truncate(out, 300)
    with pytest.raises(UserError, match="damaged .*run the corpus stage again"):
        corpus.read_prompts(out)
    corpus.main(arguments(lines(question(1))))
    pq.write_table(pq.read_table(out).drop(["kind"]), out)
    with pytest.raises(UserError, match="columns .* are not those the corpus stage writes"):
        corpus.read_prompts(out)


def test_a_folder_with_an_equals_sign_adds_no_column(arguments, tmp_path):
    corpus.main(arguments(lines(question(1))))
    odd = tmp_path / "lr=3"
    (tmp_path / "out").rename(odd)
    (prompt,) = corpus.read_prompts(odd / "src.parquet")
    assert prompt.prompt_ids[0] == START
