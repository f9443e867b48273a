"""The project's own prompts: enough of each kind, varied, and split so that each kind is measured."""

import json
import re
from collections import Counter
from itertools import combinations

import pytest
from tiny import ROOT

from dflash import config
from dflash.chat import as_prompt, check_messages
from dflash.corpus import sample_id, split_of

FOLDER = ROOT / "config/prompts"
# The demo's, plainly put; and longer, less plain ones.
ROWS, VARIED = (
    [json.loads(line) for line in (FOLDER / name).read_text(encoding="utf-8").splitlines()]
    for name in ("quickstart.jsonl", "varied.jsonl")
)
KINDS = {"explain", "code", "math", "rewrite", "list", "story"}


def messages(row):
    given = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
    return as_prompt(check_messages(given, row["id"]))[0]


@pytest.mark.parametrize("rows", [ROWS, VARIED], ids=["quickstart", "varied"])
def test_enough_of_each_kind(rows):
    kinds = Counter(row["kind"] for row in rows)
    assert set(kinds) == KINDS and sum(kinds.values()) >= 600 and min(kinds.values()) >= 100


def test_no_id_twice_and_some_prompts_of_several_turns():
    assert len({row["id"] for row in ROWS + VARIED}) == len(ROWS + VARIED)
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

    every = [(row["id"], grams(row)) for row in ROWS + VARIED]
    near = [(a, b) for (a, x), (b, y) in combinations(every, 2) if len(x & y) > 0.35 * len(x | y)]
    assert near == []


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_openings_vary(kind):
    """Half of the demo's programs are in Python, and a third of its stories are called so."""
    asked = [messages(row)[-1]["content"].lower() for row in ROWS if row["kind"] == kind]
    openings = Counter(tuple(text.split()[:3]) for text in asked)
    most = openings.most_common(1)[0][1]
    assert most < {"code": 0.5, "story": 0.3}.get(kind, 0.15) * len(asked)
    assert len(openings) >= 0.2 * len(asked)


def test_openings_vary_more_in_the_longer_prompts():
    openings = Counter(
        (row["kind"], *messages(row)[-1]["content"].lower().split()[:3]) for row in VARIED
    )
    assert openings.most_common(1)[0][1] <= 8
