"""Slot hidden states from the speculators library's own loader and model, on the CPU, for comparison.

    PEERS_PYTHON tests/peers/speculators_hidden.py --drafter FOLDER --target FOLDER --input X.st --out Y.st

PEERS_PYTHON is the interpreter of an environment of its own with speculators 0.9.0 (docs/export.md).
X.st  `taps [S, T*H]`, `ids [S]`, `anchors [N]`: one document and the places where blocks begin.
Y.st  `hidden [N, B, H]` after the final norm, float32; `embed [V, H]` and `head [V, H]` as it took them
      from the target.
"""

import argparse
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import speculators.models.dflash.core as core  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from speculators import SpeculatorModelConfig  # noqa: E402
from speculators.losses import resolve_loss_config  # noqa: E402
from speculators.models.dflash import DFlashDraftModel  # noqa: E402

p = argparse.ArgumentParser()
for name in ("--drafter", "--target", "--input", "--out"):
    p.add_argument(name, required=True)
a = p.parse_args()
torch.set_num_threads(1)
config = SpeculatorModelConfig.from_pretrained(a.drafter)
config.transformer_layer_config._attn_implementation = "sdpa"  # flex attention needs a compiler
config.speculators_config.verifier.name_or_path = a.target  # null where the target is a folder
model = DFlashDraftModel.from_pretrained(a.drafter, config=config, dtype=torch.float32)
x = load_file(a.input)
anchors = x["anchors"]
core.select_anchors = lambda mask, n, b: (anchors, torch.ones_like(anchors, dtype=torch.bool))
seen = {}
model.norm.register_forward_hook(lambda module, inputs, out: seen.update(hidden=out))
rows = len(x["ids"])
with torch.no_grad():
    model.eval()(
        hidden_states=x["taps"][None],
        input_ids=x["ids"][None],
        loss_mask=torch.ones(1, rows, dtype=torch.long),
        verifier_last_hidden_states=torch.zeros(
            1, rows, config.transformer_layer_config.hidden_size
        ),
        document_ids=torch.zeros(1, rows, dtype=torch.long),
        position_ids=torch.arange(rows)[None],
        loss_config=resolve_loss_config("ce", "eager"),
        gamma=4.0,
        max_anchors=len(anchors),
    )
hidden = seen["hidden"].reshape(len(anchors), config.block_size, -1).float().contiguous()
save_file(
    {"hidden": hidden, "embed": model.embed_tokens.weight.detach().float().contiguous(),
     "head": model.lm_head.weight.detach().float().clone()},
    a.out,
)  # fmt: skip
