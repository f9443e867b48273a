"""Stage `report`: everything the other stages found out, as one HTML page and one summary.

    python -m dflash.report --identity results/target/identity.json \\
        --corpus results/corpus/*.json --tokens results/tokens/*/*.json \\
        --features results/features/*/*.json \\
        --training results/drafters/*/training.json --evaluations results/evaluate/*/*.json \\
        --exports results/export/*/config.json --benchmarks results/benchmarks/*/*.tsv \\
        --html results/report.html --summary results/summary.json
    python -m dflash.report --show results/summary.json

Reading is in results.py, the page in page.py, its drawings in drawing.py. Equal inputs give equal
bytes.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from dflash import results
from dflash.drawing import number
from dflash.errors import entrypoint
from dflash.files import read_settings, write_json, write_text
from dflash.page import page


def closing_table(summary: results.Summary, folder: Path) -> str:
    """The table that ends a run, for a terminal of any encoding; `folder` holds the summary."""
    lines = [f"target {summary.target}"]
    for name, d in summary.drafters.items():
        rows = [*d.per_kind.items(), ("overall", d)]
        rows += [(f"overall, {t}", f) for t, f in d.tasks.items() if t != d.task]
        width = max(len(label) for label, _ in rows)
        head = f"{'kind':<{width}}  responses  tau mean  tau pooled  speed-up  checked  identical"
        lines += ["", f"drafter {name} on {d.task}", f"  {head}"]
        for label, f in rows:
            mean, pooled, speed = (
                number(x, dash="-") for x in (f.tau_mean, f.tau_pooled, f.speed_up)
            )
            lines.append(
                f"  {label:<{width}}  {f.responses:>9}  {mean:>8}  {pooled:>10}  {speed:>8}  "
                f"{f.lossless.checked:>7}  {f.lossless.identical:>9}"
            )
        if any(f.lossless.checked > f.lossless.identical for f in (d, *d.tasks.values())):
            lines.append("  WARNING: outputs differ from the target's own; the report names them")
    return "\n".join([*lines, "", f"report: {Path(os.path.normpath(folder / summary.report))}"])


def gather(args: argparse.Namespace) -> results.Inputs:
    """Read everything the command line names."""

    def shards(paths: list[str]) -> results.Counts:
        return [(Path(p).parent.name, results.read(results.Statistics, p)) for p in paths]

    return results.Inputs(
        target=results.read(results.Target, args.identity),
        corpus=[(Path(p).stem, results.read(results.Statistics, p)) for p in args.corpus],
        tokens=shards(args.tokens),
        features=shards(args.features),
        drafters=results.read_drafters(args.training, args.evaluations, args.exports, args.served),
        costs=results.read_costs(args.benchmarks),
    )


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m dflash.report", description="Write the report, or print a summary."
    )
    parser.add_argument("--show", type=Path, metavar="SUMMARY", help="print this summary's table")
    parser.add_argument("--settings", default="{}", help="JSON; the report has no settings yet")
    add = parser.add_argument
    needed = [
        add("--identity", help="identity.json of the target stage"),
        add("--training", nargs="+", help="training.json of each drafter, in order"),
        add("--evaluations", nargs="+", help="of each drafter on each task, the leading one first"),
        add("--exports", nargs="+", help="config.json in each exported folder"),
        add("--html", type=Path, help="page to write"),
        add("--summary", type=Path, help="summary.json to write"),
    ]
    add("--served", nargs="*", default=[], help="what a running server told, on each task")
    add("--corpus", nargs="*", default=[], help="statistics of the corpus stage")
    add("--tokens", nargs="*", default=[], help="statistics of the regenerate stage")
    add("--features", nargs="*", default=[], help="manifests of the extract stage")
    add("--benchmarks", nargs="*", type=Path, default=[], help="Snakemake's benchmarks of the jobs")
    args = parser.parse_args(argv)
    missing = [a.option_strings[0] for a in needed if getattr(args, a.dest) is None]
    if missing and not args.show:
        parser.error(f"missing {', '.join(missing)} (or --show)")
    return args


def main(argv: list[str] | None) -> None:
    args = parse(argv)
    if args.show:
        print(closing_table(results.read(results.Summary, args.show), args.show.parent))
        return
    read_settings(args.settings)
    inputs = gather(args)
    report = os.path.relpath(args.html, args.summary.parent)
    write_text(args.html, page(inputs) + "\n")
    write_json(args.summary, results.summarise(inputs, report))
    print(f"report: {args.html}, summary: {args.summary}")


if __name__ == "__main__":
    entrypoint(main)
