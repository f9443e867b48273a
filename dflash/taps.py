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


def run_decoder(model: nn.Module, **inputs: Any) -> Any:
    """Forward of the model without its head: logits of a whole vocabulary are never made."""
    return decoder(model)(**inputs)


class Taps:
    """Catches the outputs of the given layers while it is open.

        with Taps(model, [1, 4, 8]) as taps:
            run_decoder(model, input_ids=ids)
        hidden_BSTH = taps.stack()

    Each forward replaces what the one before left; nothing else is kept or copied. What the last
    forward gave stays until `clear`.
    """

    def __init__(self, model: nn.Module, layer_ids: Sequence[int]):
        self.decoder = decoder(model)
        layers = self.decoder.layers
        if not all(0 <= i < len(layers) for i in layer_ids):
            raise UserError(
                f"taps {list(layer_ids)}: expected layer ids from 0 to {len(layers) - 1}, as the "
                f"target has {len(layers)} layers; change the drafter's `taps`"
            )
        self.layers = [layers[i] for i in layer_ids]
        self.states: dict[int, Tensor] = {}  # position in layer_ids -> [B, S, H]
        self._handles: list[Any] = []

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
            self.states[position] = output[0] if isinstance(output, tuple) else output

        return hook

    def clear(self) -> None:
        """Let go of the caught tensors."""
        self.states.clear()

    def stack(self, dtype: torch.dtype | None = None) -> Tensor:
        """What the last forward gave: [B, S, T, H], taps in the order asked for.

        `dtype` converts on the way (to bfloat16: round to nearest even). Taps of a model that is
        spread over several devices are gathered on that of the first tap.
        """
        if not self.layers or len(self.states) != len(self.layers):
            raise RuntimeError("no forward has passed through the tapped layers")
        first = self.states[0]
        shape = (*first.shape[:2], len(self.layers), first.shape[2])
        out_BSTH = torch.empty(shape, dtype=dtype or first.dtype, device=first.device)
        for position, state_BSH in self.states.items():
            out_BSTH[:, :, position].copy_(state_BSH)
        return out_BSTH
