"""The demo's own prompts: enough of each kind, varied, and split so that each kind is measured."""

import json
import re
from collections import Counter
from itertools import combinations

from tiny import ROOT

from dflash import config
from dflash.chat import as_prompt, check_messages
from dflash.corpus import sample_id, split_of

PATH = ROOT / "config/prompts/quickstart.jsonl"
ROWS = [json.loads(line) for line in PATH.read_text(encoding="utf-8").splitlines()]
KINDS = {"explain", "code", "math", "rewrite", "list", "story"}


def messages(row):
    given = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
    return as_prompt(check_messages(given, row["id"]))[0]


def test_enough_of_each_kind():
    kinds = Counter(row["kind"] for row in ROWS)
    assert set(kinds) == KINDS and sum(kinds.values()) >= 600 and min(kinds.values()) >= 100
    assert len({row["id"] for row in ROWS}) == len(ROWS)
    turns = Counter(len(messages(row)) > 1 for row in ROWS)
    assert turns[True] >= 30


def test_the_demo_holds_out_at_least_twenty_of_each_kind():
    corpus = config.demo_workflow().corpus
    (source,) = corpus.sources
    rows = ROWS[: source.limit]
    held = Counter(
        row["kind"]
        for row in rows
        if split_of(sample_id(messages(row)), corpus.heldout_share) == "heldout"
    )
    assert set(held) == KINDS and min(held.values()) >= 20
    assert len(rows) - sum(held.values()) >= 300


def test_no_near_duplicates():
    def grams(row):
        words = re.findall(r"\w+", " ".join(m["content"] for m in messages(row)).lower())
        return {tuple(words[i : i + 3]) for i in range(max(1, len(words) - 2))}

    every = [(row["id"], grams(row)) for row in ROWS]
    near = [(a, b) for (a, x), (b, y) in combinations(every, 2) if len(x & y) > 0.35 * len(x | y)]
    assert near == []


def test_openings_vary():
    openings = Counter(
        (row["kind"], *messages(row)[-1]["content"].lower().split()[:3]) for row in ROWS
    )
    assert openings.most_common(1)[0][1] <= 8
