"""Trainings that two processes take together and one takes alone (tests/cuda)."""

from __future__ import annotations

from typing import Any

from dflash import config

SETTINGS = {
    "block_size": 4,
    "num_hidden_layers": 2,
    "taps": [0, 1, 2],
    "mask_token_id": 3,
    "training": {
        "max_steps": 3,
        "documents_per_step": 5,  # so that the ranks have two and three
        "anchors_per_document": 8,
        "lr": 3e-3,
        "dtype": "bfloat16",
        "validation": {"share": 0.0},
    },
}
CASES = {  # settings of the training, of the machine
    "uneven": ({"dtype": "float32", "ema": 0.9}, {}),
    "half precision, validated": (
        {"validation": {"share": 0.2, "times": 2}, "loss": {"labels": "soft"}},
        {"checkpointing": "selective"},
    ),
    "sharded": ({"dtype": "float32", "ema": 0.9}, {"sharding": "fsdp"}),
    "sharded, half precision": (
        {"validation": {"share": 0.2, "times": 2}},
        {"sharding": "fsdp", "checkpointing": "selective"},
    ),
}


def settings_of(training: dict[str, Any] | None = None, **more: Any) -> config.Drafter:
    """The settings with some of the training's changed."""
    changed = SETTINGS["training"] | (training or {}) | more
    return config.Drafter.model_validate(SETTINGS | {"training": changed})
