"""Write a trained drafter as the published checkpoint: what vLLM, SGLang and the official package load.

    python -m dflash.export --identity results/target/identity.json --drafter results/drafters/demo \\
        --evaluations results/evaluate/demo/*.json --corpus results/corpus/*.json \\
        --tokens results/tokens/*/*.json --out results/export/demo

The folder holds `config.json`, `model.safetensors` (bfloat16, one file, no prefix) and the model card
`README.md`. Embedding and head are the target's and are not in it. If asked for, `speculators/` holds
the same weights in the layout of the speculators library.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from dflash import card, config, results, target
from dflash.drafter import (
    Drafter,
    DrafterConfig,
    check_fits,
    config_text,
    load_drafter,
    save_drafter,
    target_record,
)
from dflash.errors import UserError, entrypoint
from dflash.files import read_settings, whole, write_json, write_text

SPECULATORS = "0.9.0"  # the version whose layout is written


def speculators_json(
    c: DrafterConfig, identity: target.Identity, dtype: str = "bfloat16"
) -> dict[str, Any]:
    """config.json in the layout of the speculators library: flat, and its tap ids count from the
    embedding's output, so they are one higher.

    Raises UserError for a drafter that the layout cannot describe: its full layers always see the
    whole block, and vLLM takes its one flag for all layers.
    """
    causal = {c.visibility(i).causal for i in range(c.num_hidden_layers)}
    slides = "sliding_attention" in c.layer_types
    if len(causal) > 1 or (True in causal and not slides):
        raise UserError(
            "export.formats: the speculators layout cannot say which layers of this drafter are causal "
            f"(layer_types {', '.join(c.layer_types)}, is_causal {c.is_causal}); leave it out"
        )
    layers = c.to_json(dtype)
    ours = ("architectures", "dflash_config", "num_target_layers", "block_size", "is_causal")
    for key in (*ours, "trained_for", "rope_theta", "rope_scaling"):
        layers.pop(key, None)
    proposal = {"proposal_type": "greedy", "speculative_tokens": c.block_size - 1}
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_version": SPECULATORS,
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [proposal | {"verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "default_proposal_method": "greedy",
            "verifier": {
                "name_or_path": card.hub_model(identity),
                "architectures": [identity.architecture],
            },
        },
        "transformer_layer_config": layers,
        "draft_vocab_size": c.vocab_size,
        "block_size": c.block_size,
        "aux_hidden_state_layer_ids": [i + 1 for i in c.target_layer_ids],
        "mask_token_id": c.mask_token_id,
        "sliding_window_non_causal": causal == {False},
        "sample_from_anchor": False,
        "tie_word_embeddings": False,
        "dtype": dtype,
    }


def write_export(folder: Path, drafter: Drafter, facts: card.Facts) -> None:
    """Write everything the export holds into an existing folder."""
    save_drafter(folder, drafter, "bfloat16")
    if "speculators" in facts.formats:
        (folder / "speculators").mkdir()
        save_drafter(folder / "speculators", drafter, "bfloat16")
        layout = speculators_json(drafter.config, facts.identity)
        write_json(folder / "speculators/config.json", layout)
    write_text(folder / "README.md", card.model_card(facts))


def main(argv: list[str] | None) -> None:
    parser = argparse.ArgumentParser(prog="python -m dflash.export", description=__doc__)
    parser.add_argument("--settings", default="{}", help="JSON, or a JSON or YAML file")
    parser.add_argument("--identity", required=True, help="the target's identity.json")
    parser.add_argument("--drafter", required=True, type=Path, help="folder of the trained drafter")
    parser.add_argument(
        "--evaluations", nargs="*", default=[], help="its evaluations, for the card"
    )
    parser.add_argument("--corpus", nargs="*", default=[], help="statistics of the prompts")
    parser.add_argument("--tokens", nargs="*", default=[], help="statistics of the answers")
    parser.add_argument("--out", required=True, type=Path, help="folder to write")
    args = parser.parse_args(argv)
    own = {k: v for k, v in read_settings(args.settings).items() if k not in ("stage", "version")}
    settings = config.check(config.Export, own, "export")
    identity = target.read_identity(args.identity)
    drafter = load_drafter(args.drafter)
    check_fits(drafter, identity, args.drafter)
    drafter.config = replace(drafter.config, trained_for=target_record(identity))
    record = args.drafter / "training.json"
    training = results.read(results.Training, record) if record.is_file() else None
    facts = card.Facts(
        name=training.name if training else args.drafter.name,
        config=drafter.config,
        identity=identity,
        training=training,
        evaluations=[results.read(results.Evaluation, path) for path in args.evaluations],
        corpus=[(Path(p).stem, results.read(results.Statistics, p)) for p in args.corpus],
        tokens=[(Path(p).parent.name, results.read(results.Statistics, p)) for p in args.tokens],
        licence=settings.licence,
        formats=settings.formats,
    )
    with whole(args.out, folder=True) as folder:
        write_export(folder, drafter, facts)
    size = (args.out / "model.safetensors").stat().st_size / 1e6
    print(f"exported {args.out}: {config_text(drafter.config)}; {size:.1f} MB")


if __name__ == "__main__":
    entrypoint(main)
