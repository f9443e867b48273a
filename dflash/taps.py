"""Taps: the outputs of chosen decoder layers, caught while the target runs.

Tap i is the output of the 0-based decoder layer i, before the final norm: Hugging Face's
`hidden_states[i + 1]`, except for the last layer, where Hugging Face gives the value after the
final norm and a tap gives the one before it. vLLM and SGLang count one higher.

Legend: B documents · S tokens · T taps · H hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from dflash.errors import UserError


def decoder(model: nn.Module) -> nn.Module:
    """The part of a Hugging Face causal LM that ends before the head.

    Raises UserError for a model that is not laid out as the known families are.
    """
    found = model.get_decoder() if hasattr(model, "get_decoder") else getattr(model, "model", None)
    if not isinstance(getattr(found, "layers", None), nn.ModuleList):
        raise UserError(
            f"{type(model).__name__} has no list of layers at get_decoder().layers; expected a "
            "decoder-only model laid out like Llama or Qwen: choose another target"
        )
    return found


# What the families call the norm between the last layer and the head.
FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f")


def final_norm(model: nn.Module) -> nn.Module:
    """The norm between the last decoder layer and the head, as the model has it.

    Raises UserError for a model that has none of a known name.
    """
    found = decoder(model)
    norms = [getattr(found, name) for name in FINAL_NORMS if hasattr(found, name)]
    if len(norms) != 1 or not isinstance(norms[0], nn.Module):
        raise UserError(
            f"{type(model).__name__} has {len(norms)} of the modules {', '.join(FINAL_NORMS)}, expected "
            "one as its final norm; set `training.loss.labels: data`, which needs none"
        )
    return norms[0]


def rope_edge(config: Any) -> int | None:
    """Tokens beyond which a text's positions are all turned otherwise, from its first on; None: never.

    Phi-3 with a long context has two sets of frequencies (longrope) and chooses by the longest text
    of a batch, so texts on both sides of the edge must not be read together.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    return rope["original_max_position_embeddings"] if rope.get("rope_type") == "longrope" else None


def softcap(config: Any) -> float | None:
    """The cap that a model of this config sets its logits (Gemma 2), None without one."""
    return getattr(config, "final_logit_softcapping", None)


def softcapped(logits: Tensor, cap: float | None) -> Tensor:
    """Logits squeezed into (-cap, cap): their order stays, their distribution does not."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


def head_logits(model: nn.Module, hidden: Tensor) -> Tensor:
    """What the model's head makes of final hidden states: [..., H] -> [..., V]."""
    return softcapped(model.get_output_embeddings()(hidden), softcap(model.config))


def run_decoder(model: nn.Module, **inputs: Any) -> Any:
    """Forward of the model without its head: logits of a whole vocabulary are never made."""
    return decoder(model)(**inputs)


class Taps:
    """Catches the outputs of the given layers while it is open.

        with Taps(model, [1, 4, 8]) as taps:
            run_decoder(model, input_ids=ids)
        hidden_BSTH = taps.stack()

    As soon as a layer has finished, its output is copied to its place among the taps, in `dtype` if
    that is given (to bfloat16: round to nearest even), so that the model's own tensor can go. Each
    forward begins anew; what the last one gave stays until `clear`. Taps of a model that is spread
    over several devices are gathered on that of the first tapped layer.
    """

    def __init__(
        self, model: nn.Module, layer_ids: Sequence[int], dtype: torch.dtype | None = None
    ):
        self.decoder = decoder(model)
        layers = self.decoder.layers
        if not all(0 <= i < len(layers) for i in layer_ids):
            raise UserError(
                f"taps {list(layer_ids)}: expected layer ids from 0 to {len(layers) - 1}, as the "
                f"target has {len(layers)} layers; change the drafter's `taps`"
            )
        self.layers = [layers[i] for i in layer_ids]
        self.dtype = dtype
        self._handles: list[Any] = []
        self.clear()

    def __enter__(self) -> Self:
        # Emptied first, so that a forward that fails midway leaves no mixture of old and new.
        self._handles.append(self.decoder.register_forward_pre_hook(lambda *_: self.clear()))
        for position, layer in enumerate(self.layers):
            self._handles.append(layer.register_forward_hook(self._hook(position)))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook(self, position: int) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            state_BSH = output[0] if isinstance(output, tuple) else output
            if self._hidden_BSTH is None:
                B, S, H = state_BSH.shape
                self._hidden_BSTH = state_BSH.new_empty(B, S, len(self.layers), H, dtype=self.dtype)
            self._hidden_BSTH[:, :, position].copy_(state_BSH)
            self._caught.add(position)

        return hook

    def clear(self) -> None:
        """Let go of what was caught."""
        self._hidden_BSTH: Tensor | None = None
        self._caught: set[int] = set()

    def stack(self) -> Tensor:
        """What the last forward gave: [B, S, T, H], taps in the order asked for."""
        if self._hidden_BSTH is None or len(self._caught) != len(self.layers):
            raise RuntimeError("no forward has passed through the tapped layers")
        return self._hidden_BSTH
