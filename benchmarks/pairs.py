"""Tiny targets with random weights, and drafters that learned part of their answers.

For comparisons with other programs: what they accept must be neither nothing nor everything. Used by
`official.py` and `serve_vllm.py`; head width 32, since vLLM's CPU attention has no kernel for less.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from dflash.attention import Layout
from dflash.decode import generate
from dflash.drafter import Drafter, DrafterConfig, block_input, save_drafter
from dflash.taps import Taps, run_decoder

END, MASK, VOCAB, WIDTH = 1, 3, 320, 64
TAPS = (0, 2)


@dataclass(frozen=True)
class Pair:
    """A target and a drafter in folders of their own, and prompts as token ids."""

    case: str
    target: Path
    drafter: Path
    prompts: list[list[int]]


def make_pair(
    folder: Path,
    tied: bool,
    block: int,
    sliding: int | None = None,
    is_causal: bool | None = None,
    prompts: int = 20,
    new_tokens: int = 48,
) -> Pair:
    """Write a target (tied: Llama, else Qwen3) and a drafter taught for a moment on its answers."""
    case = f"{'tied' if tied else 'untied'}, block {block}"
    case += f", window {sliding}" if sliding else ""
    case += {None: "", True: ", causal", False: ", not causal"}[is_causal]
    torch.manual_seed(int(tied))
    shape = dict(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=96, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=512,
        initializer_range=0.15, bos_token_id=None, eos_token_id=END, pad_token_id=0,
        tie_word_embeddings=tied,
    )  # fmt: skip
    kind = (LlamaForCausalLM, LlamaConfig) if tied else (Qwen3ForCausalLM, Qwen3Config)
    model = kind[0](kind[1](**shape)).eval().requires_grad_(False)
    model.save_pretrained(folder / "target")
    layers = ("sliding_attention" if sliding else "full_attention",) * 2
    drafter = Drafter(
        DrafterConfig(
            hidden_size=WIDTH, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, rms_norm_eps=1e-6, rope_theta=10000.0,
            max_position_embeddings=512, vocab_size=VOCAB, block_size=block, mask_token_id=MASK,
            target_layer_ids=TAPS, num_target_layers=4, layer_types=layers,
            sliding_window=sliding, is_causal=is_causal, eos_token_id=END, pad_token_id=0,
        )
    )  # fmt: skip
    drafter.init_weights(0)
    g = torch.Generator().manual_seed(7)
    lengths = torch.randint(1, 40, (prompts,), generator=g).tolist()
    ids = [torch.randint(4, VOCAB, (n,), generator=g).tolist() for n in lengths]
    _teach(model, drafter, ids, new_tokens)
    (folder / "drafter").mkdir()
    save_drafter(folder / "drafter", drafter, "bfloat16")
    return Pair(case, folder / "target", folder / "drafter", ids)


def _teach(model, drafter: Drafter, prompts: list[list[int]], new_tokens: int) -> None:
    """A few passes over the target's own greedy answers, blocks at every place of them."""
    embed, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    responses, _ = generate(model, prompts, new_tokens, [END])
    examples = []
    for prompt, response in zip(prompts, responses, strict=True):
        ids = torch.tensor(prompt + response.tokens)
        with Taps(model, TAPS) as taps, torch.no_grad():
            run_decoder(model, input_ids=ids[None])
        anchors = torch.arange(len(prompt), len(ids) - 1)
        if len(anchors):
            examples.append((ids, taps.stack()[0].flatten(1), anchors))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    block = drafter.config.block_size
    for _ in range(8):
        for ids, features, anchors in examples:
            layout = Layout(torch.tensor([0, len(ids)]), anchors, block)
            at = anchors[:, None] + torch.arange(1, block)
            inside = at < len(ids)
            hidden = drafter(features, block_input(embed, ids[anchors], block, MASK), layout)
            loss = F.cross_entropy(hidden[:, 1:][inside] @ head.T, ids[at[inside]])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
