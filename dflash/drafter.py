"""The DFlash drafter: a few decoder layers that read the target's hidden states and fill a block.

Shapes: S context rows · N blocks · B slots a block · T taps · H hidden width · Q query heads ·
K key/value heads · d head width. `...` stands for [N, B] in training and [batch, B] in decoding.

Context keys and values come from the target's tapped hidden states (`fc`, `hidden_norm`, then each
layer's own projections); queries come from the block alone. A block is the anchor token followed by
mask tokens; the hidden state of slot k, through the target's head, predicts the token at anchor + k.
Tensor names and config.json are those of the published checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from torch.utils.checkpoint import checkpoint

from dflash.attention import Layout, Memo, Visibility, attend, group_rows_within
from dflash.errors import UserError
from dflash.files import is_folder, read_json, save_tensors, write_json
from dflash.paper import spread_taps

if TYPE_CHECKING:
    from dflash.target import Identity

CHECKPOINTING = ("none", "layer", "group", "both", "selective")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PICKLES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True)
class DrafterConfig:
    """Shape of a drafter, with the names of the published config.json."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None  # None: a published config.json that does not say
    layer_types: tuple[str, ...]
    sliding_window: int | None = None
    is_causal: bool | None = None  # inside the block; None: causal where a layer slides
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    # model, revision and weights_sha256 of the target; serving engines ignore it
    trained_for: dict[str, str] | None = None

    def __post_init__(self):
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"drafter: {self.num_attention_heads} query heads do not divide among "
                f"{self.num_key_value_heads} key/value heads; choose a multiple"
            )
        if len(self.layer_types) != self.num_hidden_layers:
            raise UserError(
                f"drafter: {len(self.layer_types)} layer_types for {self.num_hidden_layers} layers"
            )
        if unknown := sorted({*self.layer_types} - {"full_attention", "sliding_attention"}):
            raise UserError(
                f"drafter: layer_types {', '.join(unknown)} are not supported; allowed: "
                "full_attention, sliding_attention"
            )

    def visibility(self, layer: int) -> Visibility:
        """How far the slots of a layer see."""
        slides = self.layer_types[layer] == "sliding_attention"
        return Visibility(
            window=self.sliding_window if slides else None,
            causal=slides if self.is_causal is None else self.is_causal,
        )

    def group_rows(self, limit: int, longest: int, block: int, itemsize: int) -> int:
        """Slots in one attention group, whose temporaries stay within `limit` bytes in every layer.

        Args:
            longest: tokens of the longest document.
            block: slots of a block.
            itemsize: bytes of a number in the matrix products.
        """
        windows = [self.visibility(i).window or longest for i in range(self.num_hidden_layers)]
        return group_rows_within(
            limit,
            min(longest, max(windows)),
            block,
            self.num_attention_heads,
            self.num_key_value_heads,
            self.head_dim,
            itemsize,
        )

    def to_json(self, dtype: str) -> dict[str, Any]:
        """The published config.json (both spellings of the rotary settings: transformers 4 and 5)."""
        out = {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "dtype": dtype,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "use_cache": True,
            "vocab_size": self.vocab_size,
            "tie_word_embeddings": False,
            "max_position_embeddings": self.max_position_embeddings,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "layer_types": list(self.layer_types),
            "sliding_window": self.sliding_window,
            # transformers drops the window unless this is true
            "use_sliding_window": self.sliding_window is not None,
            "max_window_layers": self.num_hidden_layers,
            "num_target_layers": self.num_target_layers,
            "block_size": self.block_size,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_id,
            "pad_token_id": self.pad_token_id,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
                "block_size": self.block_size,
            },
        }
        if self.is_causal is not None:
            out["is_causal"] = self.is_causal
        if self.trained_for is not None:
            out["trained_for"] = self.trained_for
        return out

    @classmethod
    def from_json(cls, data: dict[str, Any], where: str) -> DrafterConfig:
        """Read a published config.json; what it leaves out is filled in as the official package does.

        Raises UserError naming what is missing, malformed or not supported.
        """
        _check_kind(data, where)
        inner = data.get("dflash_config") or {}
        rope = data.get("rope_parameters") or {}
        _check_supported(data, inner, rope, where)

        def either(name: str, default: Any = None) -> Any:
            """A drafter's own setting: within `dflash_config`, else at the top."""
            value = inner.get(name)
            return data.get(name, default) if value is None else value

        filled = {"head_dim": 128, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, **data}
        found = {name: filled.get(name) for name in SHAPE if name in filled}
        found["rope_theta"] = rope.get("rope_theta") or data.get("rope_theta")
        found["mask_token_id"] = either("mask_token_id")
        found["block_size"] = either("block_size", 16)
        missing = [n for n in (*SHAPE, "rope_theta", "mask_token_id") if found.get(n) is None]
        layers, target_layers = found.get("num_hidden_layers"), data.get("num_target_layers")
        taps = either("target_layer_ids")
        if taps is None and target_layers is None:
            missing.append("dflash_config.target_layer_ids")
        if missing:
            raise UserError(f"{where}: found no {', '.join(missing)}; give a complete config.json")
        for name, value in found.items():
            if type(value) is not int and not (name in FRACTIONS and type(value) is float):
                raise UserError(f"{where}: {name}: found {json.dumps(value)}, expected a number")
        if taps is not None and not (isinstance(taps, list) and all(type(i) is int for i in taps)):
            raise UserError(
                f"{where}: target_layer_ids: found {json.dumps(taps)}, expected layer numbers"
            )
        # the window counts only where transformers is told to use it
        window = data.get("sliding_window") if data.get("use_sliding_window") else None
        first = layers if window is None else data.get("max_window_layers", 28)
        kinds = data.get("layer_types") or [
            "full_attention" if i < first else "sliding_attention" for i in range(layers)
        ]
        causal = data.get("is_causal")
        return cls(
            **found | {"rope_theta": float(found["rope_theta"])},
            target_layer_ids=tuple(spread_taps(layers, target_layers) if taps is None else taps),
            num_target_layers=target_layers,
            layer_types=tuple(kinds),
            sliding_window=window,
            is_causal=inner.get("causal") if causal is None else causal,
            trained_for=data.get("trained_for"),
            **{k: data.get(k) for k in ("bos_token_id", "eos_token_id", "pad_token_id")},
        )


SHAPE = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "max_position_embeddings",
    "vocab_size",
)
FRACTIONS = ("rms_norm_eps", "rope_theta")


def _check_kind(data: Any, where: str) -> None:
    """Refuse everything that is no DFlash 1 drafter, by the name of what it is."""
    if not isinstance(data, dict):
        raise UserError(f"{where}: found {type(data).__name__}, expected the settings of a drafter")
    inner, names = data.get("dflash_config") or {}, data.get("architectures") or []
    name = str(names[0]) if names else "nothing named in `architectures`"
    if "speculators_model_type" in data:
        raise UserError(
            f"{where}: this is the layout of the speculators library "
            f"({data['speculators_model_type']}); give the same drafter in the published layout"
        )
    if name.startswith("DFlash2") or {"selector_rank", "conv_kernel_size"} & set(inner):
        raise UserError(
            f"{where}: this is a DFlash 2 drafter, which is not supported yet; give one of DFlash 1 "
            "(architecture DFlashDraftModel)"
        )
    if name != "DFlashDraftModel" and not (inner and not names):
        eagle = "eagle" in json.dumps([*names, *data]).lower()
        what = "an EAGLE drafter" if eagle else "no drafter"
        raise UserError(
            f"{where}: this is {what} ({name}); give the folder of a DFlash drafter (architecture "
            "DFlashDraftModel)"
        )


def _check_supported(data: dict, inner: dict, rope: dict, where: str) -> None:
    """Refuse settings of published drafters that would change what it computes."""
    scaling = data.get("rope_scaling") or {}
    rotary = {rope.get("rope_type"), scaling.get("rope_type", scaling.get("type"))}
    both = {**data, **rope, **inner}
    neutral: dict[str, tuple[Any, ...]] = {
        "partial_rotary_factor": (1,),
        "is_neox_style": (True,),
        "attention_bias": (False,),
        "hidden_act": ("silu",),
        "quantization_config": (),
        "input_embedding_scale": (1,),
        "output_multiplier": (1,),
        "final_logit_softcapping": (0,),
        "draft_vocab_size": (data.get("vocab_size"),),
        "target_hidden_size": (data.get("hidden_size"),),
        "sample_from_anchor": (False,),
        "attention_sink_bias": (False,),
        "attention_value_scale": (1,),
        "use_swa": (False,),
        "swa_window_size": (data.get("sliding_window"),),
    }
    odd = [k for k, fine in neutral.items() if both.get(k) not in (None, *fine)]
    odd += ["scaled rotary positions"] * bool(rotary - {None, "default"})
    if odd:
        raise UserError(f"{where}: {', '.join(odd)}: not supported by this version")


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last axis, computed in float32 (float64 stays)."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        y = F.rms_norm(x.to(wide), self.weight.shape, self.weight.to(wide), self.eps)
        return y.to(x.dtype)


def rope(positions: torch.Tensor, head_dim: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of the half-rotation at absolute positions [...]; float32 [..., d]."""
    pair = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device)
    angle = positions.float()[..., None] * theta ** -(pair / head_dim)
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn heads [..., heads, d] by the angles [..., d]."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return (x * cos[..., None, :] + turned * sin[..., None, :]).to(x.dtype)


Rope = tuple[torch.Tensor, torch.Tensor]
# (queries, block keys, block values), each [..., heads, d] -> attention output [..., Q, d]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Attention(nn.Module):
    def __init__(self, c: DrafterConfig):
        super().__init__()
        self.head_dim = c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, c.num_attention_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)

    def keys_values(self, x: torch.Tensor, at: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [..., K, d] of context or block rows [..., H]."""
        k = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim)))
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        return rotate(k, *at), v

    def forward(self, x: torch.Tensor, at: Rope, attend: Attend) -> torch.Tensor:
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim)))
        out = attend(rotate(q, *at), *self.keys_values(x, at))
        return self.o_proj(out.flatten(-2))


class MLP(nn.Module):
    def __init__(self, c: DrafterConfig):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c: DrafterConfig):
        super().__init__()
        self.self_attn = Attention(c)
        self.mlp = MLP(c)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, x: torch.Tensor, at: Rope, attend: Attend) -> torch.Tensor:
        """Block stream [..., H] -> [..., H]; the context enters through `attend` alone."""
        x = x + self.self_attn(self.input_layernorm(x), at, attend)
        return x + self.mlp(self.post_attention_layernorm(x))

    def over_pack(
        self,
        x_NBH: torch.Tensor,
        context_SH: torch.Tensor,
        at_NB: Rope,
        at_S: Rope,
        layout: Layout,
        see: Visibility,
        backend: str,
        recompute: bool = False,
        reentrant: bool = False,
        memo: Memo | None = None,
    ) -> torch.Tensor:
        """The layer in training: every block of a pack over its document's context."""
        k_SKd, v_SKd = self.self_attn.keys_values(context_SH, at_S)

        def over_context(q, k, v):
            return attend(q, k_SKd, v_SKd, k, v, layout, see, backend, recompute, reentrant, memo)

        return self(x_NBH, at_NB, over_context)


class Drafter(nn.Module):
    """The trainable part. Embedding table and head are the target's and are passed in."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.config = c = config
        self.fc = nn.Linear(len(c.target_layer_ids) * c.hidden_size, c.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.layers = nn.ModuleList([Layer(c) for _ in range(c.num_hidden_layers)])
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def init_weights(self, seed: int) -> None:
        """Random matrices N(0, 1/fan_in) from the seed alone, norms at one."""
        g = torch.Generator().manual_seed(seed)
        for p in self.parameters():
            with torch.no_grad():
                if p.dim() == 1:
                    p.fill_(1.0)
                else:
                    p.copy_(torch.randn(p.shape, generator=g) / p.shape[1] ** 0.5)

    def context(self, taps: torch.Tensor) -> torch.Tensor:
        """Tapped hidden states, concatenated [..., T·H], as the context of all layers [..., H]."""
        return self.hidden_norm(self.fc(taps))

    def rope(self, positions: torch.Tensor) -> Rope:
        """Cosine and sine at absolute positions, [..., d]."""
        return rope(positions, self.config.head_dim, self.config.rope_theta)

    def forward(
        self,
        taps_SD: torch.Tensor,
        block_NBH: torch.Tensor,
        layout: Layout,
        backend: str = "split",
        checkpointing: str = "none",
        reentrant: bool = False,
    ) -> torch.Tensor:
        """Training: hidden states of all slots after the final norm, [N, B, H].

        Args:
            taps_SD: tapped hidden states of the packed documents, [S, T·H].
            block_NBH: embedded blocks (anchor token, then mask tokens), [N, B, H].
            layout: where documents and anchors lie.
            backend: how attention is computed (see `attention`); all give the same numbers.
            checkpointing: what the backward pass recomputes: nothing ("none"), each layer
                ("layer"), each attention group ("group"), "both", or each layer without its
                attention ("selective"; the same as "layer" with backends other than `split` and
                `chunked`).
            reentrant: use torch's older checkpoint, which runs the recomputation as a backward pass
                of its own; "selective" does not exist there.
        """
        if checkpointing not in CHECKPOINTING:
            raise ValueError(
                f"no checkpointing {checkpointing!r}; there are {', '.join(CHECKPOINTING)}"
            )
        if checkpointing == "selective" and reentrant:
            raise ValueError("selective checkpointing needs the non-reentrant kind")
        recompute = checkpointing in ("group", "both")
        layers = checkpointing in ("layer", "both", "selective") and torch.is_grad_enabled()
        # nothing here is random
        options: dict[str, Any] = {"use_reentrant": reentrant, "preserve_rng_state": False}
        numbers = layout.on_device(taps_SD.device)
        context_SH = self.context(taps_SD)
        at_S = self.rope(numbers.context_positions_S)
        at_NB = self.rope(numbers.block_positions_NB)
        x = block_NBH
        for i, layer in enumerate(self.layers):
            see = self.config.visibility(i)
            memo = Memo() if layers and checkpointing == "selective" else None
            args = (x, context_SH, at_NB, at_S, layout, see, backend, recompute, reentrant, memo)
            x = checkpoint(layer.over_pack, *args, **options) if layers else layer.over_pack(*args)
        return self.norm(x)


def block_input(
    embed_VH: torch.Tensor, anchor_tokens: torch.Tensor, block_size: int, mask_token_id: int
) -> torch.Tensor:
    """Blocks of `[anchor token, MASK, ...]`, embedded: tokens [...] -> [..., B, H]."""
    ids = torch.full((*anchor_tokens.shape, block_size), mask_token_id, device=anchor_tokens.device)
    ids[..., 0] = anchor_tokens
    return F.embedding(ids, embed_VH)


# Gemma also norms what attention and MLP give. Its norm of the first name is one of those; the one
# before the MLP, the part that this name has in a drafter, has the second.
BEFORE_MLP = ("post_attention_layernorm", "pre_feedforward_layernorm")


def start_from_target(
    drafter: Drafter,
    tensors: dict[str, torch.Tensor],
    target_layers: list[int],
    prefix: str,
    norm_offset: int = 0,
) -> list[str]:
    """Copy what fits from the target: final norm, whole layers' tensors, and the last tap through fc.

    `tensors` are the target's by their names under `prefix` (`model.`); drafter layer i takes
    those of `target_layers[i]`. A tensor that the target does not have, or in another shape, stays
    random. `norm_offset` is added to
    gains, since a drafter's norm multiplies by its weight and some targets' by 1 + weight. Returns
    the names copied.
    """
    own, copied = dict(drafter.named_parameters()), []

    def take(name: str, source: str) -> None:
        value = tensors.get(prefix + source)
        if value is not None and own[name].shape == value.shape:
            own[name].data.copy_(value + norm_offset if value.dim() == 1 else value)
            copied.append(name)

    take("norm.weight", "norm.weight")
    for i, source in enumerate(target_layers):
        for name in own:
            if name.startswith(f"layers.{i}."):
                theirs = name.replace(f"layers.{i}.", f"layers.{source}.", 1)
                before_mlp = theirs.replace(*BEFORE_MLP)
                take(name, before_mlp if prefix + before_mlp in tensors else theirs)
    width = drafter.config.hidden_size
    with torch.no_grad():
        drafter.fc.weight.zero_()
        drafter.fc.weight[:, -width:] = torch.eye(width)
    return [*copied, "fc.weight"]


# --- checkpoints ------------------------------------------------------------------------------


def save_drafter(folder: Path, drafter: Drafter, dtype: str) -> None:
    """Write `config.json` and `model.safetensors` in the published format into an existing folder."""
    state = {
        k: v.detach().to("cpu", DTYPES[dtype]).contiguous() for k, v in drafter.state_dict().items()
    }
    save_tensors(folder / "model.safetensors", state)
    write_json(folder / "config.json", drafter.config.to_json(dtype))


def read_drafter_config(folder: str | Path) -> DrafterConfig:
    """The config.json of a folder in the published format, ours or another's."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise UserError(f"{path}: no such file; give the folder of a DFlash drafter")
    return DrafterConfig.from_json(read_json(path), str(path))


def load_drafter(folder: str | Path, device: torch.device | str = "cpu") -> Drafter:
    """Read a drafter in the published format, ours or another's, as float32 and in eval mode.

    Raises UserError naming the folder and the tensors that are missing, unknown or misshapen.
    """
    folder = Path(folder)
    drafter = Drafter(read_drafter_config(folder))
    state = _read_tensors(folder)
    if all(name.startswith("model.") for name in state):
        state = {name.removeprefix("model."): value for name, value in state.items()}
    want = {name: list(value.shape) for name, value in drafter.state_dict().items()}
    have = {name: list(value.shape) for name, value in state.items()}
    if reduced := sorted({"d2t", "t2d"} & {*state}):
        raise UserError(
            f"{folder}: holds {', '.join(reduced)}: drafters over a reduced vocabulary are not supported"
        )
    for fault, names in (
        ("its weights lack", sorted({*want} - {*have})),
        ("its weights hold what a DFlash drafter has not:", sorted({*have} - {*want})),
    ):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise UserError(
                f"{folder}: {fault} {', '.join(names[:5])}{more}; give a complete, unchanged checkpoint"
            )
    for name, value in state.items():
        if have[name] != want[name]:
            raise UserError(
                f"{folder}: {name} has shape {have[name]}, config.json implies {want[name]}; give the "
                "config.json that belongs to these weights"
            )
        if value.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            raise UserError(
                f"{folder}: {name} is stored as {value.dtype}; quantised drafters are not supported"
            )
    drafter.load_state_dict(state)
    return drafter.to(device).eval().requires_grad_(False)


def _read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of model.safetensors, or of the shards that its index names."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        files = [single]
    elif index.is_file():
        places = read_json(index)
        names = set(places.get("weight_map", {}).values()) if isinstance(places, dict) else set()
        if not names:
            raise UserError(f"{index}: names no shards; fetch or export the drafter again")
        files = [folder / name for name in sorted(names)]
    else:
        pickles = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLES)
        if pickles:
            raise UserError(
                f"{folder}: holds only pickled weights ({pickles[0]}), which can run code when they are "
                "read; save them as safetensors"
            )
        raise UserError(f"{folder}: holds no model.safetensors; give the folder of a saved drafter")
    state: dict[str, torch.Tensor] = {}
    for path in files:
        try:
            state |= load_file(path)
        except (OSError, SafetensorError) as e:
            raise UserError(
                f"{path}: cannot be read ({e}); fetch or export the drafter again"
            ) from None
    return state


def target_record(identity: Identity) -> dict[str, str]:
    """What a drafter keeps of its target: a name without a path of this machine, and the weights."""
    model = Path(identity.model).name if is_folder(identity.model) else identity.model
    return {
        "model": model,
        "revision": identity.revision,
        "weights_sha256": identity.weights_sha256,
    }


def check_fits(drafter: Drafter, identity: Identity, folder: str | Path) -> None:
    """Refuse a drafter made for another target. Raises UserError naming what differs.

    A checkpoint without a record of its target, as published ones are, is checked for shapes only.
    """
    c = drafter.config
    wrong = [
        f"{name} {mine} against {theirs}"
        for name, mine, theirs in (
            ("hidden_size", c.hidden_size, identity.hidden_size),
            ("num_target_layers", c.num_target_layers, identity.num_hidden_layers),
            ("vocab_size", c.vocab_size, identity.vocab_size),
        )
        if mine not in (None, theirs)
    ]
    wrong += [f"tap {i} of {identity.num_hidden_layers} layers" for i in c.target_layer_ids
              if not 0 <= i < identity.num_hidden_layers]  # fmt: skip
    if not 0 <= c.mask_token_id < identity.vocab_size:
        wrong.append(f"mask token {c.mask_token_id} of {identity.vocab_size} tokens")
    if wrong:
        raise UserError(
            f"{folder}: this drafter does not fit the target {identity.model} ({'; '.join(wrong)}); "
            "use it with the target it was trained for"
        )
    made = c.trained_for
    if made and made.get("weights_sha256") != identity.weights_sha256:
        raise UserError(
            f"{folder}: this drafter was trained for {made.get('model')}, revision "
            f"{made.get('revision')}, weights {str(made.get('weights_sha256'))[:12]}; the target is "
            f"{identity.model}, weights {identity.weights_sha256[:12]}: use it with its own target (if "
            "this is the same model saved anew, delete `trained_for` from the drafter's config.json)"
        )


def config_text(config: DrafterConfig) -> str:
    """One line that names a drafter's shape."""
    c = config
    return (
        f"{c.num_hidden_layers} layers of width {c.hidden_size}, heads {c.num_attention_heads}:"
        f"{c.num_key_value_heads} of {c.head_dim}, block {c.block_size}, taps "
        f"{json.dumps(list(c.target_layer_ids))}"
    )
