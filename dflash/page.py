"""The report's page: its sections, from the main figures down to the settings, and its style."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from typing import Any

from dflash import drawing, results
from dflash.drawing import Dot, Html, Series, el, join, number, percent, plural, table
from dflash.results import Drafter, Evaluation, Figures, Inputs, break_even, total
from dflash.serving import launch_lines


def page(inputs: Inputs) -> str:
    """The whole report. It needs nothing but itself and follows the reader's light or dark mode."""
    drafters = inputs.drafters
    title = f"DFlash drafter{'' if len(drafters) == 1 else 's'} for {inputs.target.model}"
    lead = (
        "A drafter proposes the next tokens; the target checks them all in one pass and keeps "
        "those it would have chosen itself. What that gives was measured by really decoding "
        "prompts that training never saw."
    )
    body = [
        el("header", el("h1", title), el("p", lead, class_="lead")),
        [warning(d, e) for d in drafters for runs in d.runs.values() for e in runs],
        el("section", [headline(d) for d in drafters], class_="cards"),
        [task_section([(d, d.tasks[task]) for d in drafters]) for task in drafters[0].tasks],
        training_section(drafters),
        cost_section(inputs),
        counts_section(inputs),
        drafters_section(drafters),
        target_section(inputs.target),
        serving_section(inputs),
        reading_section(),
    ]
    head = [
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("title", title),
        el("style", Html(STYLE)),
    ]
    whole = el("html", el("head", head), el("body", el("main", body)), lang="en")
    return "<!DOCTYPE html>\n" + whole


def section(title: str, *parts: Any) -> Html:
    return el("section", el("h2", title), *parts)


# --- what was measured --------------------------------------------------------------------------


def warning(d: Drafter, e: Evaluation) -> Html | None:
    """Says which outputs differ from the target's own, if any do."""
    different = [r.sample_id for r in e.responses if r.identical is False]
    checked, same = e.overall.lossless.checked, e.overall.lossless.identical
    count = max(len(different), checked - same)
    if not count:
        return None
    outputs, differ = plural(count, "output"), "differs" if count == 1 else "differ"
    return el(
        "section",
        el("h2", f"Warning: {outputs} of {d.name} on {e.task} {differ} from the target's own"),
        el(
            "p",
            f"{same} of {checked} outputs checked in {e.dtype} are identical. Drafting must not "
            "change what the target says: do not serve this before the reason is known. A tie "
            "between two nearly equal tokens is the harmless one.",
        ),
        el("p", "Samples: ", [join(el("code", s), " ") for s in different]) if different else None,
        class_="warning",
        role="alert",
    )


def headline(d: Drafter) -> Html:
    """A drafter's main figures, and what they mean in words."""
    e, f = d.task, d.task.overall
    figures = [
        [el("dt", "τ mean"), el("dd", number(f.tau_mean))],
        [el("dt", "τ pooled"), el("dd", number(f.tau_pooled))],
        [el("dt", "speed-up"), el("dd", drawing.times(f.speed_up))],
        [el("dt", "outputs identical"), el("dd", identical(f))],
    ]
    return el(
        "article",
        el("h2", drawing.legend_mark(d.look), d.name, el("small", f" on {e.task}")),
        el("dl", [el("div", figure) for figure in figures], class_="key"),
        el("p", acceptance_words(f, e.block_size)),
        el("p", speed_words(f, e.measured_on), " ", lossless_words(e)),
        break_even_words(e),
        rival_words(f),
        class_=f"card {drawing.colour(d.look)}",
    )


def identical(f: Figures) -> str:
    return f"{f.lossless.identical} of {f.lossless.checked}" if f.lossless.checked else "–"


def interval(ends: tuple[float, float] | None, between: str) -> str:
    return between.join(number(x) for x in ends or ())


def acceptance_words(f: Figures, block: int) -> Html:
    if f.tau_mean is None:
        nothing = "Every response ended with its first token, so there was nothing to draft."
        return el("strong", nothing)
    around = (
        f" (95 % interval {interval(f.tau_mean_interval, ' to ')})" if f.tau_mean_interval else ""
    )
    main = f"Each pass of the target yields {number(f.tau_mean)} tokens{around}"
    return join(
        el("strong", f"{main}; plain decoding yields 1."),
        f" That is the mean over {plural(f.responses, 'response')} of each one's own mean; over "
        f"all {plural(f.cycles, 'cycle')} together it is {number(f.tau_pooled)}. "
        f"A block allows {block} at most.",
    )


def speed_words(f: Figures, measured_on: str) -> str:
    if f.speed_up is None:
        return "The speed was not measured."
    words = f"One prompt at a time, decoding with it is {f.speed_up:.2f} times as fast as without"
    words += f" (measured on {measured_on})" if measured_on else ""
    return words + ("." if f.speed_up >= 1 else ": there it does not pay yet.")


def lossless_words(e: Evaluation) -> str:
    found = e.overall.lossless
    checked, same = found.checked, found.identical
    if e.temperature:
        return (
            "Outputs were sampled, so none can be compared: that the samples keep the target's "
            "distribution is tested in the decoder."
        )
    if not checked and found.divergences is not None:
        return divergence_words(e)
    if not checked:
        return "Outputs were not compared with the target's own: that needs float32."
    if same == checked:
        return f"All {plural(checked, 'output')} checked are identical to the target's own."
    return f"Only {same} of {checked} outputs are identical to the target's own: see the warning."


def divergence_words(e: Evaluation) -> str:
    """Where rounding decides, how close the decisions were."""
    found = e.overall.lossless
    count, near = found.divergences or 0, found.near_ties
    if not count:
        return f"Every token is the target's own choice, in {e.dtype}."
    words = (
        f"In {e.dtype}, {plural(count, 'token')} of {plural(len(e.responses), 'response')} "
        f"{'is' if count == 1 else 'are'} not the target's choice when it reads the whole answer at "
        f"once. Of these {near:,} ({percent(near / count)}) "
        f"{'is a near-tie' if near == 1 else 'are near-ties'}: the target's two best logits are at most "
        f"{found.near_tie_margin:g} apart there, which rounding alone turns"
    )
    return words + f"; the widest margin is {number(found.largest_margin)}."


def rival_words(f: Figures) -> Html | None:
    """The cheap rival, which drafts by looking up what followed the last tokens before."""
    if f.speed_up_lookup is None:
        return None
    return el(
        "p",
        f"Prompt lookup, which needs no drafter, reaches τ = {number(f.tau_lookup)} on the timed "
        f"prompts where the drafter reaches {number(f.tau_timed)}, and decodes "
        f"{f.speed_up_lookup:.2f} times as fast as plain decoding.",
        class_="note",
    )


def break_even_words(e: Evaluation) -> Html | None:
    point, f = break_even(e), e.overall
    plain = f.seconds_per_token_plain
    if point is None or plain is None:
        return None
    tau, reached = point
    drafting = f", {percent(f.draft_share)} of it drafting" if f.draft_share is not None else ""
    beyond = f", more than a block of {e.block_size} can yield" if tau > e.block_size else ""
    return el(
        "p",
        f"A cycle takes {1000 * plain * tau:.1f} ms{drafting}; a plain step of the target takes "
        f"{1000 * plain:.1f} ms. Drafting breaks even at τ = {number(tau)}{beyond}; the timed "
        f"prompts reached {number(reached)}.",
        class_="note" if tau <= reached else None,
    )


Measured = list[tuple[Drafter, Evaluation]]  # all drafters on one task
Kinds = list[tuple[str, list[tuple[Drafter, Figures]]]]  # their figures by kind; "overall" is last


def task_section(measured: Measured) -> Html:
    """Acceptance and speed on one task: by kind of prompt, by slot, by cycle."""
    first = measured[0][1]
    timed = max(len(e.timed) for _, e in measured)
    how = (
        f"{plural(len(first.responses), 'prompt')}, at most {first.max_new_tokens} new tokens, "
        f"{decoded(first)}, in {first.dtype}; the speed on {timed} of them, decoded one at a time."
    )
    kinds = by_group(measured, "per_kind")
    languages = by_group(measured, "per_language")
    charts = [tau_chart(kinds), speed_chart(kinds), slot_chart(measured), gained_chart(measured)]
    title = f"Acceptance and speed on {first.task}"
    tables = [
        kind_table("Kind", kinds),
        # one language and the overall row would say the same twice
        kind_table("Language", languages[:-1]) if len(languages) > 2 else None,
        runs_table([(d, d.runs[first.task]) for d, _ in measured]),
        served_table(side_by_side(measured, first.task)),
    ]
    return section(title, el("p", how), tables, el("div", charts, class_="charts"))


def decoded(e: Evaluation) -> str:
    if not e.temperature:
        return "greedy"
    return f"sampled at temperature {e.temperature:g} ({(e.rule or '').replace('_', '-')})"


def by_group(measured: Measured, field: str) -> Kinds:
    """The figures of every kind or language, and overall."""
    groups = [(d, getattr(e, field)) for d, e in measured]
    names = dict.fromkeys(name for _, group in groups for name in group)
    rows = [(n, [(d, group[n]) for d, group in groups if n in group]) for n in names]
    return [*rows, ("overall", [(d, e.overall) for d, e in measured])]


def runs_table(drafters: list[tuple[Drafter, list[Evaluation]]]) -> Html | None:
    """Every temperature and block size, beside the rival; None where there is nothing to compare."""
    every = [(d, e) for d, runs in drafters for e in runs]
    if len(every) == len(drafters) and all(e.overall.speed_up_lookup is None for _, e in every):
        return None
    head = ["Drafter", "Decoding", "Block", "τ mean", "τ pooled", "95 % interval", "Speed-up"]
    head += ["Lookup τ", "Lookup speed-up", "Not the target's choice"]
    rows = []
    for d, runs in drafters:
        for i, e in enumerate(runs):
            f = e.overall
            near = plural(f.lossless.near_ties, "near-tie") if f.lossless.divergences else ""
            odd = "–" if e.temperature or f.lossless.divergences is None else None
            cells = [str(e.block_size), number(f.tau_mean), number(f.tau_pooled)]
            cells += [interval(f.tau_pooled_interval, " – ") or "–", drawing.times(f.speed_up)]
            cells += [number(f.tau_lookup), drawing.times(f.speed_up_lookup)]
            cells += [odd or f"{f.lossless.divergences}" + (f" ({near})" if near else "")]
            rows.append([d.name if i == 0 else None, decoded(e), *cells])
    caption = "Every way it was decoded, beside prompt lookup on the timed prompts"
    return table(caption, head, rows, 2)


Beside = list[tuple[Drafter, Evaluation, results.Served]]


def side_by_side(measured: Measured, task: str) -> Beside:
    """What servers told, each with the offline evaluation at its temperature, if there is one."""
    found = []
    for d, _ in measured:
        for served in d.served[task]:
            same = [e for e in d.runs[task] if e.temperature == served.temperature]
            own = [e for e in same if e.block_size == d.config.block_size]
            found += [(d, e, served) for e in (own or same)[:1]]
    return found


def served_table(beside: Beside) -> Html | None:
    """Offline and served figures, one above the other."""
    if not beside:
        return None
    shown = 4  # slots; the later ones are in the files
    slots = min(shown, max(len(x.overall.per_slot) for _, e, s in beside for x in (e, s)))
    head = ["Drafter", "Where", "Responses", "τ mean", "τ pooled", "95 % interval"]
    head += [*(f"Slot {k}" for k in range(1, slots + 1)), "Tokens/s", "Same answers"]
    rows = []
    for d, e, served in beside:
        per_token = e.overall.seconds_per_token_drafted
        same, both = results.same_answers(e, served)
        speeds = (1 / per_token if per_token else None, served.overall.tokens_per_second)
        agreed = ("", f"{same} of {both}" if not e.temperature else "–")
        wheres = (f"offline, {decoded(e)}, {e.dtype}", served.engine)
        each = zip((e.overall, served.overall), wheres, speeds, agreed, strict=True)
        for i, (f, where, rate, agree) in enumerate(each):
            share = [percent(f.per_slot[k]) if k < len(f.per_slot) else "–" for k in range(slots)]
            cells = [f"{f.responses:,}", number(f.tau_mean), number(f.tau_pooled)]
            cells += [interval(f.tau_pooled_interval, " – ") or "–", *share, number(rate, 1), agree]
            rows.append([d.name if i == 0 else None, where, *cells])
    note = (
        "The server counts drafts beyond the end of an answer too, the offline figures leave them "
        "out. Its tokens/s are its own clock's."
    )
    return el("div", table("Served beside offline", head, rows, 2), el("p", note, class_="note"))


def kind_table(what: str, kinds: Kinds) -> Html:
    """One row for each kind and drafter; with one drafter, without its name."""
    several = len(kinds[-1][1]) > 1
    head = [what, *(["Drafter"] if several else []), "Responses", "τ mean", "95 % interval"]
    head += ["τ pooled", "Speed-up", "Identical"]
    rows = []
    for kind, row in kinds:
        for i, (d, f) in enumerate(row):
            cells = [f"{f.responses:,}", number(f.tau_mean)]
            cells += [interval(f.tau_mean_interval, " – ") or "–"]
            cells += [number(f.tau_pooled), drawing.times(f.speed_up), identical(f)]
            rows.append([kind if i == 0 else None, *([d.name] if several else []), *cells])
    caption = f"Acceptance and speed by {what.lower()} of prompt"
    return table(caption, head, rows, 2 if several else 1)


def tau_chart(kinds: Kinds) -> Html:
    title = "Tokens a pass of the target (τ) by kind"
    note = "Filled: mean over responses, with its 95 % interval. Hollow: pooled over cycles."
    rows = [
        (k, [Dot(d.name, d.look, f.tau_mean, f.tau_mean_interval, f.tau_pooled) for d, f in row])
        for k, row in kinds
    ]
    return drawing.dot_chart(title, rows, "τ", note)


def speed_chart(kinds: Kinds) -> Html:
    note = "Right of 1 the drafter makes decoding faster. Few prompts of each kind are timed."
    rows = [(k, [Dot(d.name, d.look, f.speed_up) for d, f in row]) for k, row in kinds]
    return drawing.dot_chart("Speed-up by kind", rows, "times plain decoding", note)


def slot_chart(measured: Measured) -> Html:
    share = "share of cycles in which the slot was accepted"
    note = "Slot 1 is the first drafted token. One plus the sum of all shares is τ pooled."
    series = [Series(d.name, d.look, list(enumerate(e.overall.per_slot, 1))) for d, e in measured]
    return drawing.line_chart("Acceptance per slot", series, "slot", share, note, share=True)


def gained_chart(measured: Measured) -> Html:
    series, most = [], 0
    for d, e in measured:
        counts = Counter(gained for r in e.responses for gained in r.cycles)
        shares = [(gained, n / counts.total()) for gained, n in sorted(counts.items())]
        series.append(Series(d.name, d.look, shares))
        most = max([most, *counts])
    note = f"One token means that nothing drafted was accepted. No cycle gained more than {most}."
    return drawing.bar_chart("Tokens gained in a cycle", series, "tokens", "share of cycles", note)


def training_section(drafters: list[Drafter]) -> Html:
    """The curves over steps, and where each training's time went."""
    losses, taus, accepted = [], [], []
    for d in drafters:
        t = d.training
        for chart, field in ((losses, "loss"), (accepted, "accepted_by_position")):
            points = [(line.step, getattr(line, field)) for line in t.history]
            chart.append(Series(d.name, d.look, drawing.thin(points)))
        if t.validations:
            block = max(v.block_size for v in t.validations)
            points = [(v.step, v.tau_mean) for v in t.validations if v.block_size == block]
            taus.append(Series(d.name, d.look, points))
    walked = "On documents kept from training, walked as decoding would; the best weights are handed over."
    note = "Averaged over training positions: an indication, not τ."
    charts = [drawing.line_chart("Loss", losses, "step", "weighted loss of a slot")]
    if taus:
        charts.append(drawing.line_chart("τ in training", taus, "step", "tokens a cycle", walked))
    charts.append(drawing.line_chart("Accepted by position", accepted, "step", "tokens", note))
    return section("Training", el("div", charts, class_="charts"), training_table(drafters))


def training_table(drafters: list[Drafter]) -> Html | None:
    """What each training took its weights from, and the shares of its time."""
    parts = list(dict.fromkeys(part for d in drafters for part in d.training.shares))
    if not parts:
        return None
    rows = []
    for d in drafters:
        t = d.training
        best = f"{t.best.step:,} (τ {t.best.tau_mean:.2f})" if t.best else f"{t.steps:,}, the last"
        rows.append([d.name, best, *(percent(t.shares.get(p, 0.0)) for p in parts)])
    return table("Time of training by part", ["Drafter", "Weights of step", *parts], rows)


# --- what it took -------------------------------------------------------------------------------


def cost_section(inputs: Inputs) -> Html:
    """Where time and space went; what was counted stands with the counts."""
    space = {
        "target": sum(inputs.target.files.values()),
        "hidden states": total(inputs.features, "bytes"),
    }
    space |= {f"drafter {d.name}, exported": d.export_bytes for d in inputs.drafters}
    rows = [[what, drawing.data_size(size)] for what, size in space.items()]
    sizes = table("Sizes on disk", ["What", "Size"], rows)
    return section("Time and size", el("div", time_table(inputs.costs), sizes, class_="pair"))


def time_table(costs: dict[str, results.Cost]) -> Html:
    """Time and memory by stage."""
    if not costs:
        return el("p", "No times were recorded.")
    whole = sum(c.seconds for c in costs.values())
    rows: list[Any] = []
    for stage, c in costs.items():
        share = c.seconds / whole if whole else 0.0
        bar = el("span", el("span", style=f"width:{100 * share:.1f}%"), class_="track")
        shares = [bar, el("span", percent(share), class_="share")]
        memory = drawing.data_size(None if c.peak_mb is None else c.peak_mb * 1e6)
        rows.append([stage, c.jobs, drawing.duration(c.seconds), shares, memory])
    rows.append(["all", sum(c.jobs for c in costs.values()), drawing.duration(whole), "", ""])
    head = ["Stage", "Jobs", "Time", "Share", "Peak memory"]
    note = "Times are added over jobs, also those that ran at once. Memory is the largest job's."
    return el("div", table("Time by stage", head, rows), el("p", note, class_="note"))


# Names of the counts that stages write; others are shown by their own names.
LABELS = {
    "corpus": {
        "rows": "rows read",
        "kept": "prompts kept",
        "duplicates": "dropped: the same prompt again",
        "too_long": "dropped: longer than corpus.max_prompt_tokens",
        "trailing_replies_dropped": "replies in the data not used: the target answers itself",
    },
    "regenerate": {
        "documents": "prompts answered",
        "tokens": "tokens of prompts and answers",
        "response_tokens": "tokens of answers",
        "responses_below_2_tokens": "answers of fewer than 2 tokens",
    },
    "extract": {
        "documents": "documents stored",
        "tokens": "tokens stored",
        "supervised_tokens": "tokens to learn from",
        "documents_cut": "cut at extract.max_tokens",
        "documents_too_short": "dropped: too short for a block",
        "documents_without_supervision": "dropped: nothing to learn from",
    },
}
NO_COUNTS = ("hidden_size", "bytes")  # whole numbers in statistics that count nothing


def counts_section(inputs: Inputs) -> Html:
    """What came in, and what was left out on the way; all counts of all stages."""
    groups = {
        "corpus": count_rows("corpus", inputs.corpus),
        "regenerate": count_rows("regenerate", inputs.tokens),
        "extract": count_rows("extract", inputs.features),
    }
    for d in inputs.drafters:
        t = d.training
        groups[f"train {d.name}"] = [
            ("documents used", t.documents),
            ("dropped: without a block to learn from", t.documents_without_block),
            ("dropped: repeated in another source", t.documents_repeated),
            ("kept for validation", t.documents_validated),
            ("steps left out: loss or gradient no number", t.skipped_steps),
            ("labels outside the reduced head", sum(h.labels_outside_head for h in t.history)),
        ]
    rows = [
        [stage if i == 0 else None, what, f"{count:,}"]
        for stage, counts in groups.items()
        for i, (what, count) in enumerate(counts)
    ]
    tables = table("All counts", ["Stage", "What", "Count"], rows, 2), kinds_table(inputs.corpus)
    return section("What was used and what was dropped", el("div", tables, class_="pair"))


def count_rows(stage: str, files: results.Counts) -> list[tuple[Any, int]]:
    """Every whole number in a stage's statistics, summed over its shards, and by source."""
    rows: list[tuple[Any, int]] = []
    sources = list(dict.fromkeys(source for source, _ in files))
    for key in dict.fromkeys(key for _, s in files for key in s.counts if key not in NO_COUNTS):
        label: Any = LABELS[stage].get(key, key.replace("_", " "))
        if len(sources) > 1:
            each = [(name, total([f for f in files if f[0] == name], key)) for name in sources]
            by_source = ", ".join(f"{name} {count:,}" for name, count in each)
            label = [label, el("div", by_source, class_="note")]
        rows.append((label, total(files, key)))
    ended = [(s.counts.get("documents", 0), s.ended_share) for _, s in files]
    cut = [round(n * (1 - share)) for n, share in ended if share is not None]
    return rows + ([("answers cut at regenerate.max_new_tokens", sum(cut))] if cut else [])


def kinds_table(corpus: results.Counts) -> Html | None:
    """Prompts of each kind, for training and held out."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for _, statistics in corpus:
        for split, kinds in statistics.kinds.items():
            for kind, n in kinds.items():
                counts[kind][split] += n
    rows = [[kind, f"{n['train']:,}", f"{n['heldout']:,}"] for kind, n in sorted(counts.items())]
    return table("Prompts by kind", ["Kind", "Training", "Held out"], rows) if rows else None


# --- what was used, and how to use it -----------------------------------------------------------


def drafters_section(drafters: list[Drafter]) -> Html:
    """Shape, training and settings side by side; a dash for what only other drafters have."""

    def compare(caption: str, columns: list[dict[str, str]]) -> Html | None:
        names = dict.fromkeys(name for column in columns for name in column)
        rows = [[name, *(column.get(name, "–") for column in columns)] for name in names]
        return table(caption, ["What", *(d.name for d in drafters)], rows) if rows else None

    tables = [
        compare("Shape", [flat(d.config.model_dump()) for d in drafters]),
        compare("Training", [training_facts(d.training) for d in drafters]),
        compare("Settings", [flat(d.training.settings) for d in drafters]),
    ]
    title = "Drafter" if len(drafters) == 1 else "Drafters"
    return section(title, el("div", tables, class_="pair"))


def training_facts(t: results.Training) -> dict[str, str]:
    last = t.last
    return {
        "weights": number(t.weights, 0),
        "training steps": f"{t.steps:,}",
        "epochs": number(last.epoch if last else None),
        "tokens in the head while training": number(t.head_tokens, 0),
        "final loss": number(last.loss if last else None, 3),
        "seconds a step": number(last.seconds_per_step if last else None),
    }


def flat(facts: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested facts by their dotted names in the file; those that are null are left out."""
    out: dict[str, str] = {}
    for key, value in facts.items():
        if isinstance(value, dict):
            out |= flat(value, f"{prefix}{key}.")
        elif value is not None:
            out[prefix + key] = value if isinstance(value, str) else json.dumps(value)
    return out


def target_section(target: results.Target) -> Html:
    """What the target is, in full."""
    rows = [
        [name, el("code", value[:12], title=value) if name.endswith("sha256") else value]
        for name, value in flat(target.model_dump(exclude={"files"})).items()
    ]
    return section("Target", table("Identity of the target", ["What", "Value"], rows, 2))


def serving_section(inputs: Inputs) -> Html:
    """Launch lines for each drafter."""
    parts = [el("p", "Run these where the workflow ran; elsewhere, give full paths.")]
    for d in inputs.drafters:
        commands = launch_lines(inputs.target.folder, str(d.export), d.config.block_size)
        for engine, command in commands.items():
            parts += [el("h3", f"{engine}, {d.name}"), el("pre", el("code", command), tabindex="0")]
    return section("How to serve it", *parts)


TERMS = {
    "τ, acceptance length": "Tokens a cycle of drafting and verifying gives, from 1 to the block "
    "size. The target's own next token is counted, the first token (from reading the prompt) is "
    "not. Published figures are the mean over responses; the pooled figure is usually lower, "
    "because responses that draft badly take more cycles.",
    "Speed-up": "Seconds per token without the drafter over seconds per token with it, in the same "
    "decoding loop, one prompt at a time, reading of the prompt left out. It belongs to the "
    "machine it was measured on.",
    "Identical": "The output equals the target's own greedy output token by token. Only float32 "
    "allows the comparison: in bfloat16 nearly equal tokens may change places.",
    "95 % interval": "Of the mean over responses, or of τ pooled where it stands beside that, by "
    "drawing responses with replacement (bootstrap).",
    "Prompt lookup": "Drafts what followed the last few tokens where they stood before, in prompt or "
    "answer. It costs nothing to train; a drafter should beat it.",
}


def reading_section() -> Html:
    """What the figures are, for comparing them with others."""
    terms = [[el("dt", term), el("dd", words)] for term, words in TERMS.items()]
    return section("How to read the figures", el("dl", terms, class_="terms"))


# Colours: Okabe and Ito's, which colour-blind readers can tell apart; lighter ones on dark.
STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1b2026; --soft: #5a646f; --rule: #dde1e6;
  --wash: #f5f6f8; --alarm: #a3200d; --alarm-wash: #fdf0ee; --c0: #0072b2; --c1: #d55e00;
  --c2: #008f68; --c3: #b0558a; --c4: #5b6570; --c5: #a07400; }
@media screen and (prefers-color-scheme: dark) { :root { --paper: #14171b; --ink: #e6e9ec;
  --soft: #a2abb5; --rule: #333a42; --wash: #1c2127; --alarm: #ff9d8c; --alarm-wash: #321a17;
  --c0: #56b4e9; --c1: #f08a3c; --c2: #2fc79b; --c3: #e39bc4; --c4: #b4bdc7; --c5: #e0b63a; } }
.s0 { --c: var(--c0); } .s1 { --c: var(--c1); } .s2 { --c: var(--c2); }
.s3 { --c: var(--c3); } .s4 { --c: var(--c4); } .s5 { --c: var(--c5); }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); line-height: 1.5;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 66rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .6rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 0 0 .6rem; overflow-wrap: anywhere; }
h2 small { font-weight: normal; color: var(--soft); } .lead { color: var(--soft); }
h3 { font-size: .95rem; margin: 1rem 0 .3rem; } p { margin: 0 0 .7rem; max-width: 46rem; }
.note { color: var(--soft); font-size: .85rem; margin: .3rem 0 0; } section { margin-top: 2.75rem; }
.cards { display: grid; gap: 1.25rem; margin-top: 1.5rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 19rem), 1fr)); }
.card { background: var(--wash); border-top: 3px solid var(--c); border-radius: 4px;
  padding: 1.1rem 1.25rem; }
.key { display: grid; gap: .8rem 1rem; margin: 0 0 1rem; max-width: 46rem;
  grid-template-columns: repeat(auto-fit, minmax(8.2rem, 1fr)); }
.key div { display: flex; flex-direction: column-reverse; }
.key dt { color: var(--soft); font-size: .82rem; }
.key dd { margin: 0; font-size: 1.75rem; line-height: 1.15; font-weight: 600;
  font-variant-numeric: tabular-nums; }
.warning { border: 2px solid var(--alarm); background: var(--alarm-wash); border-radius: 4px;
  padding: 1rem 1.25rem; margin-top: 1.5rem; } .warning h2 { color: var(--alarm); }
.scroll { overflow-x: auto; margin: 0 0 1.25rem; }
table { border-collapse: collapse; font-size: .9rem; }
caption { text-align: left; font-weight: 600; padding: 0 0 .4rem; white-space: nowrap; }
th, td { text-align: left; vertical-align: baseline; padding: .3rem 1.1rem .3rem 0;
  border-bottom: 1px solid var(--rule); }
thead th { color: var(--soft); font-weight: 500; vertical-align: bottom; }
tbody th { font-weight: 500; } td code { overflow-wrap: anywhere; }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.track { display: inline-block; width: 5rem; margin-right: .6rem; background: var(--wash); }
.share { display: inline-block; min-width: 3.2em; }
.track span { display: block; height: .7rem; background: var(--c0); min-width: 1px; }
.track, .track span, .card, .warning { print-color-adjust: exact; }
.charts { display: grid; gap: 2rem 2.5rem; align-items: start; margin-top: 1.25rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); }
.pair { display: flex; flex-wrap: wrap; gap: 1rem 4rem; align-items: flex-start; }
.pair > * { max-width: 100%; }
figure { margin: 0; max-width: 34rem; break-inside: avoid; }
figcaption { font-weight: 600; font-size: .95rem; margin-bottom: .3rem; }
svg { display: block; width: 100%; height: auto; }
svg text { font-size: 11px; fill: var(--ink); font-variant-numeric: tabular-nums; }
svg .axis { fill: var(--soft); } svg .value { font-weight: 600; } svg .end { fill: var(--c); }
.grid { stroke: var(--rule); stroke-width: 1; } .bar { fill: var(--c); }
.one { stroke: var(--soft); stroke-width: 1.2; stroke-dasharray: 3 3; }
.line { fill: none; stroke: var(--c); stroke-width: 1.8; stroke-linejoin: round; }
.dot { fill: var(--c); stroke: var(--paper); stroke-width: 1; }
.hollow { fill: var(--paper); stroke: var(--c); stroke-width: 1.6; }
.whisker { stroke: var(--c); stroke-width: 2; opacity: .55; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .1rem 1.1rem; margin: 0 0 .4rem;
  padding: 0; font-size: .85rem; }
.mark { display: inline-block; width: 1em; height: 1em; margin-right: .35em;
  vertical-align: -.1em; }
code, pre { font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace; font-size: .88em; }
pre { background: var(--wash); padding: .8rem 1rem; border-radius: 4px; overflow: auto; margin: 0; }
.terms dt { font-weight: 600; } .terms dd { margin: 0 0 .8rem; max-width: 46rem; }
@media print { main { padding: 0; max-width: none; } body { font-size: 10pt; }
  .scroll, pre { overflow: visible; } pre { white-space: pre-wrap; overflow-wrap: anywhere; }
  h2, h3, caption { break-after: avoid; } tr, .card, .warning, pre { break-inside: avoid; } }
"""
