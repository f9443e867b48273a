"""The model card of an exported drafter: what it is for, what was measured, how to serve it.

Markdown below the YAML front matter that the hub reads. Nothing in it names a place on this machine:
a target from a folder goes by the folder's name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

from dflash.config import split_hub_id
from dflash.drafter import DrafterConfig, target_record
from dflash.files import is_folder
from dflash.results import Counts, Evaluation, Figures, Lossless, Training, total
from dflash.serving import launch_lines
from dflash.target import Identity


@dataclass(frozen=True)
class Facts:
    """Everything a card is made from."""

    name: str
    config: DrafterConfig
    identity: Identity
    training: Training | None  # None: an imported drafter
    evaluations: list[Evaluation]
    corpus: Counts  # by source
    tokens: Counts  # by source, an entry a shard
    licence: str | None
    formats: list[str]


def model_card(facts: Facts) -> str:
    """README.md of the exported folder."""
    parts = [
        front_matter(facts),
        f"# {facts.name}: a DFlash drafter for {target_record(facts.identity)['model']}",
        "A DFlash drafter makes its target decode faster without changing the output: it proposes "
        "a block of tokens from the target's own hidden states, and the target checks them in one "
        "pass. It works with this target only; embedding and head are the target's and are not in "
        "this folder.",
        shape(facts),
        "## Measured",
        *[measured(e) for e in facts.evaluations],
        HOW_TO_READ if facts.evaluations else "Not measured.",
        "## Training data",
        training_data(facts),
        "## Serving",
        serving(facts),
        "## Licence",
        licence(facts),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def hub_model(identity: Identity) -> str | None:
    """The target's hub id without its revision; None where it does not come from the hub."""
    local = identity.model.startswith("embedded:") or is_folder(identity.model)
    return None if local else split_hub_id(identity.model)[0]


def front_matter(facts: Facts) -> str:
    """What the hub indexes. A licence that nobody chose is left out."""
    head: dict[str, object] = {"license": facts.licence, "base_model": hub_model(facts.identity)}
    head |= {"pipeline_tag": "text-generation", "tags": ["dflash", "speculative-decoding"]}
    known = {key: value for key, value in head.items() if value is not None}
    return f"---\n{yaml.safe_dump(known, sort_keys=False)}---"


def table(head: list[str], rows: list[list[object]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


def shape(facts: Facts) -> str:
    c, target = facts.config, target_record(facts.identity)
    rows: list[list[object]] = [
        ["target", f"{target['model']}, revision {target['revision']}"],
        ["target's weights (SHA-256)", f"`{target['weights_sha256']}`"],
        ["block size", f"{c.block_size} (drafts {c.block_size - 1} tokens)"],
        ["tapped target layers", f"{', '.join(map(str, c.target_layer_ids))} (0-based, outputs)"],
        ["mask token", c.mask_token_id],
        ["decoder layers", f"{c.num_hidden_layers} of width {c.hidden_size}"],
        ["heads", f"{c.num_attention_heads}:{c.num_key_value_heads} of {c.head_dim}"],
    ]
    if c.sliding_window is not None:
        rows.append(["sliding window", c.sliding_window])
    return table(["", ""], rows)


def measured(e: Evaluation) -> str:
    """The figures of one task."""

    def row(kind: str, f: Figures) -> list[object]:
        return [
            kind,
            f.responses,
            _tau(f.tau_mean, f.tau_mean_interval),
            _tau(f.tau_pooled, f.tau_pooled_interval),
            f"{f.speed_up:.2f}" if f.speed_up else "",
            _lossless(f.lossless, e.dtype),
        ]

    head = ["prompts", "responses", "τ mean (95 %)", "τ pooled (95 %)", "speed-up", "identical"]
    how = f"sampled at temperature {e.temperature:g}" if e.temperature else "greedy"
    rows = [row(kind, f) for kind, f in e.per_kind.items()] + [row("all", e.overall)]
    slots = e.overall.per_slot
    accepted = table(
        ["slot", *[str(k) for k in range(1, len(slots) + 1)]],
        [["accepted", *[f"{share:.3f}" for share in slots]]],
    )
    where = f" Speed: {e.measured_on}." if e.measured_on else ""
    return (
        f"Task {e.task}: {how}, blocks of {e.block_size}, {e.dtype}, at most {e.max_new_tokens} new "
        f"tokens.{where}\n\n{table(head, rows)}\n\n{accepted}"
    )


HOW_TO_READ = (
    "τ is the number of tokens a draft-and-verify cycle gives, the target's own included: as the mean "
    "over responses and over all cycles pooled. Slot k is accepted in the given share of cycles. "
    "Speed-up is over plain decoding in the same loop, one prompt at a time. Identical: outputs equal "
    "to the target's own greedy ones, token by token."
)


def _lossless(found: Lossless, dtype: str) -> str:
    if dtype != "float32" and found.divergences is not None:
        return f"{found.divergences} tokens differ, {found.near_ties} of them near-ties"
    return f"{found.identical} of {found.checked}" if found.checked else ""


def _tau(value: float | None, interval: tuple[float, float] | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" + (f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else "")


def training_data(facts: Facts) -> str:
    """Where the training's tokens come from, in counts."""
    if facts.training is None or not facts.corpus:
        return "Not recorded: this drafter was not trained by the workflow that exported it."
    rows = []
    for name, prompts in facts.corpus:
        own = [(n, s) for n, s in facts.tokens if n == name]
        held = sum(prompts.kinds.get("heldout", {}).values())
        numbers = [total(own, key) for key in ("documents", "tokens", "response_tokens")]
        rows.append([name, prompts.counts.get("kept", 0), held, *[f"{n:,}" for n in numbers]])
    head = ["source", "prompts", "held out", "documents", "tokens", "of these answers"]
    last = facts.training.last
    epochs = f", {last.epoch:.1f} passes over the documents" if last else ""
    return (
        "Prompts from the sources below, without repeated ones. Every answer was generated anew by the "
        "target itself; none comes from a person or another model. Held-out prompts were used for "
        f"measuring only.\n\n{table(head, rows)}\n\n{facts.training.steps} optimiser steps{epochs}."
    )


def serving(facts: Facts) -> str:
    hub, revision = hub_model(facts.identity), facts.identity.revision
    lines = launch_lines(
        hub or "TARGET", "DRAFTER", facts.config.block_size, revision if hub else ""
    )
    where = "`DRAFTER` is this folder or its hub id"
    where += "." if hub else f"; `TARGET` is {target_record(facts.identity)['model']}."
    blocks = [f"{engine}\n\n```sh\n{line}\n```" for engine, line in lines.items()]
    text = "\n\n".join([where, *blocks])
    if hub:
        text += f"\n\nllama.cpp converts folders: download {hub} first."
    if "speculators" in facts.formats:
        text += (
            "\n\n`speculators/` holds the same weights in the layout of the speculators library."
        )
    return text


def licence(facts: Facts) -> str:
    theirs = target_licence(facts.identity)
    of_target = (
        f"The target states {theirs}." if theirs else "The target's folder states no licence."
    )
    if facts.licence is None:
        return (
            "**Not chosen yet.** Set `export.licence` or add `license:` at the top of this file before "
            f"you publish this drafter. {of_target}"
        )
    return f"{facts.licence}. {of_target}"


def target_licence(identity: Identity) -> str | None:
    """The licence that the target's own model card names."""
    card = Path(identity.folder) / "README.md"
    if not card.is_file():
        return None
    _, *parts = card.read_text(encoding="utf-8", errors="replace").split("---\n", 2)
    try:
        head = yaml.safe_load(parts[0]) if len(parts) == 2 else None
    except yaml.YAMLError:
        return None
    found = head.get("license") if isinstance(head, dict) else None
    return str(found) if found else None
