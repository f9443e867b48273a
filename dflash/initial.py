"""The shape of a drafter and its first weights: from the target, from another drafter, or random."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dflash import config, target
from dflash.drafter import (
    BEFORE_MLP,
    Drafter,
    DrafterConfig,
    load_drafter,
    start_from_target,
    target_record,
)
from dflash.errors import UserError
from dflash.files import is_folder


def drafter_config(
    settings: config.Drafter, identity: target.Identity, start: DrafterConfig | None = None
) -> DrafterConfig:
    """The shape of a drafter: what its settings say, and the target's own where they do not, or
    that of the drafter it starts from (which `config.check_start` has seen)."""
    t = identity
    ids = config.tap_ids(settings, t.num_hidden_layers)
    layers = settings.num_hidden_layers
    heads = settings.num_attention_heads or t.num_attention_heads
    of_target = DrafterConfig(
        hidden_size=t.hidden_size,
        intermediate_size=settings.intermediate_size or t.intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=settings.num_key_value_heads or t.num_key_value_heads,
        head_dim=settings.head_dim or t.head_dim,
        rms_norm_eps=t.rms_norm_eps,
        rope_theta=settings.rope_theta or t.rope_theta,
        max_position_embeddings=t.max_position_embeddings,
        vocab_size=t.vocab_size,
        block_size=settings.block_size,
        mask_token_id=settings.mask_token_id,
        target_layer_ids=tuple(ids),
        num_target_layers=t.num_hidden_layers,
        layer_types=("sliding_attention" if settings.sliding_window else "full_attention",)
        * layers,
        sliding_window=settings.sliding_window,
        bos_token_id=t.bos_token_id,
        eos_token_id=t.eos_token_ids[0] if len(t.eos_token_ids) == 1 else list(t.eos_token_ids),
        pad_token_id=t.pad_token_id,
        trained_for=target_record(t),
    )
    if start is None:
        return of_target
    kept = ("block_size", "num_target_layers", "bos_token_id", "eos_token_id", "pad_token_id")
    return replace(start, **{k: getattr(of_target, k) for k in (*kept, "trained_for")})


def start_folder(settings: config.Drafter, where: str) -> Path | None:
    """The folder of the drafter that this one starts from, fetched from the hub if it lies there."""
    if settings.start in ("target", "random"):
        return None
    if is_folder(settings.start):
        return Path(settings.start)
    return target.fetch(settings.start, f"{where}.start")[0]


def new_drafter(
    settings: config.Drafter,
    identity: target.Identity,
    trust_remote_code: bool = False,
    start: Path | None = None,
) -> Drafter:
    """A drafter with its initial weights, a function of settings, target and the drafter in the
    folder `start`, if any."""
    if start is not None:
        drafter = load_drafter(start)
        drafter.config = drafter_config(settings, identity, drafter.config)
        return drafter.requires_grad_(True)
    drafter = Drafter(drafter_config(settings, identity))
    drafter.init_weights(settings.training.seed)
    if settings.start == "target":
        count, last = settings.num_hidden_layers, identity.num_hidden_layers
        layers = list(range(last - count, last)) if count <= last else list(range(last))
        prefix = identity.embedding_tensor.removesuffix("embed_tokens.weight")
        names = [f"{prefix}norm.weight"]
        names += [
            f"{prefix}layers.{i}.{name.split('.', 2)[2]}"
            for i in layers
            for name in drafter.state_dict()
            if name.startswith("layers.0.")
        ]
        names += [name.replace(*BEFORE_MLP) for name in names if BEFORE_MLP[0] in name]
        tensors = target.load_tensors(identity, names, optional=True)
        try:
            offset = target.norm_offset(identity, trust_remote_code)
        except UserError:  # a norm of an unknown kind; its gains are taken as they are
            offset = 0
        start_from_target(drafter, tensors, layers, prefix, offset)
    return drafter
