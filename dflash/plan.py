"""What a training will cost, before anything expensive starts: memory, disk and bytes to read.

    python -m dflash.plan --config config/qwen3-8b.yaml [--drafter NAME] [--tokens S --anchors N]
                          [--card GB] [--json]

Nothing of the real size is made. `Step` goes through one training step as `dflash.train.Trainer`
does it and books every tensor that is larger than a few numbers a row when it comes and when it goes
(a `Ledger` of bytes by purpose), so the peak is found wherever it happens to be. Each entry says
which line of the code it stands for. benchmarks/plan_check.py measures the real thing.

Legend, as in `dflash.drafter` and `dflash.attention`: S context rows of a pack · N blocks · B slots a
block · R = N·B rows of the block stream · T taps · H hidden width · I MLP width · Q query and K
key/value heads, G = Q/K · d head width · L keys of a kernel call · V rows of the head.
e: bytes of a number in matrix products (2 in bf16, 4 in float32); WIDE: of one in float32.
GB is 10^9 bytes, GiB 2^30.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from dflash import config
from dflash.attention import (
    BACKENDS,
    GATHER_BLOCKS,
    Group,
    Layout,
    Visibility,
    _calls,
    group_bytes,
    group_rows_within,
)
from dflash.drafter import CHECKPOINTING
from dflash.errors import UserError, entrypoint
from dflash.features import CHUNK_BYTES
from dflash.features import layout as chunks_of
from dflash.files import is_folder
from dflash.loss import rows_within

MOST = 1 << 20  # tokens or anchors that the command line takes

GB = 10**9
WIDE = 4  # residual stream, weights, norms, softmax and gradients are float32
BYTES = {"float32": 4, "bfloat16": 2}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# flex is compiled: what its kernels keep and need is not ours to book
PLANNED = tuple(b for b in BACKENDS if b != "flex")
# Cards by the GB that vendors name, and the MiB that nvidia-smi reports of the smallest card sold under
# that name (A10 and L4, L40S, H100, GH200, H200).
CARDS = {24: 23_028, 48: 46_068, 80: 81_559, 96: 97_871, 141: 143_771}
# What the CUDA context, cuBLAS's workspaces and the allocator's unused remains take of a card, and NCCL's
# buffers where several GPUs train together. Assumptions, not measurements.
CONTEXT_BYTES, FRAGMENTATION, NCCL_BYTES = 10**9, 0.06, 10**9

STEP = 64  # anchors; the largest number that fits is searched in these

TERMS = {
    "weights": "the drafter in float32, and its bf16 copies for matrix products",
    "optimiser": "moments, moving average, and the gradients that exist at the peak",
    "target": "the target's embedding table and head, its final norm",
    "batch": "hidden states of the pack",
    "activations": "what layers keep for the backward pass, and what they compute in passing",
    "attention": "the same of attention: queries, keys, values, outputs, copies, masks",
    "loss": "logits of one group of rows, gradients of the hidden states",
}


@dataclass(frozen=True)
class Shape:
    """Everything that decides the memory of a training step."""

    tokens: int  # S
    anchors: int  # N
    block: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int  # rows of the target's embedding table
    taps: int
    dtype: str = "bfloat16"  # of matrix products
    device: str = "cuda"
    backend: str = "split"
    checkpointing: str = "layer"
    documents: int = 1  # in the pack, of equal lengths, anchors spread evenly over each
    packs: int = 1  # in one optimiser step; from the second on gradients are there already
    head_rows: int | None = None  # of the head; None: all
    tied: bool = False  # embedding and head are one tensor
    target_dtype: str = "bfloat16"  # of the stored embedding and head
    labels: str = "data"
    loss_rows: int | None = None  # None: what `dflash.loss.rows_within` says
    group_rows: int | None = None  # None: what fits group_mb
    group_mb: int | None = None  # MiB; None: what `group_bytes` says
    window: int | None = None
    optimizer: str = "adamw"
    averaged: bool = False  # a moving average of the weights is kept
    ranks: int = 1  # GPUs that share out the documents of a step
    sharded: bool = False  # and the weights, gradients and moments

    @property
    def parts(self) -> int:
        """In how many parts what stays between steps lies."""
        return self.ranks if self.sharded else 1

    @property
    def states(self) -> int:
        """Numbers that the optimiser and the moving average keep: two moments a weight by AdamW, one a
        matrix's by Muon."""
        gains = 2 * self.hidden + self.layers * (2 * self.hidden + 2 * self.head_dim)
        moments = 2 * self.weights
        if self.optimizer == "muon":
            moments -= self.weights - gains
        return moments + self.averaged * self.weights

    @property
    def weights(self) -> int:
        """Numbers in the drafter's matrices and norms (reference/dflash.md, 3)."""
        return self.fc + 2 * self.hidden + self.layers * self.layer_weights

    @property
    def fc(self) -> int:
        return self.taps * self.hidden**2

    @property
    def layer_weights(self) -> int:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        matrices = 2 * self.hidden * (q + kv) + 3 * self.hidden * self.intermediate
        return matrices + 2 * self.hidden + 2 * self.head_dim


class Ledger:
    """Bytes alive, by term, and how they stood when there were most."""

    def __init__(self):
        self.live = dict.fromkeys(TERMS, 0)
        self.total = 0
        self.peak, self.at_peak, self.when, self.phase = 0, dict(self.live), "", ""

    def take(self, term: str, size: float) -> tuple[str, int]:
        """Something comes; returns what `drop` wants when it goes."""
        self.live[term] += int(size)
        self.total += int(size)
        if self.total > self.peak:
            self.peak, self.at_peak, self.when = self.total, dict(self.live), self.phase
        return term, int(size)

    def drop(self, *held: tuple[str, int]) -> None:
        for term, size in held:
            self.live[term] -= size
            self.total -= size

    def swing(self, term: str, size: float) -> None:
        """Something comes and goes at once."""
        self.drop(self.take(term, size))


@lru_cache(maxsize=512)
def groups_of(
    tokens: int, anchors: int, documents: int, block: int, rows: int, window: int | None
) -> tuple[list[Group], list[int]]:
    """The attention groups of a pack of equal documents with anchors spread evenly over each, and how
    many context rows of its document lie before each anchor."""
    starts, rows_N, before_N = [0], [], []
    for i in range(documents):
        length = tokens // documents + (i < tokens % documents)
        count = anchors // documents + (i < anchors % documents)
        before = [j * length // count for j in range(count)]
        rows_N += [starts[-1] + b for b in before]
        before_N += before
        starts.append(starts[-1] + length)
    layout = Layout(torch.tensor(starts), torch.tensor(rows_N), block, rows)
    return layout.groups(Visibility(window)), before_N


def group_rows(shape: Shape) -> int:
    """Slots in one attention group, as `dflash.gradient.group_rows` chooses them."""
    s = shape
    longest = -(-s.tokens // s.documents)
    return s.group_rows or group_rows_within(
        s.group_mb * 2**20 if s.group_mb else group_bytes(s.device),
        min(longest, s.window or longest),
        s.block,
        s.heads,
        s.kv_heads,
        s.head_dim,
        BYTES[s.dtype],
    )


class Step:
    """One optimiser step over packs of one shape, tensor by tensor."""

    def __init__(self, shape: Shape):
        self.s, self.book = shape, Ledger()
        self.e = BYTES[shape.dtype]
        self.narrow = self.e < WIDE
        self.cuda = shape.device == "cuda"
        self.rows = shape.anchors * shape.block
        self.q, self.kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.groups, self.before_N = groups_of(
            shape.tokens,
            shape.anchors,
            shape.documents,
            shape.block,
            group_rows(shape),
            shape.window,
        )
        self.casts: dict[Any, tuple[str, int]] = {}  # bf16 copies of weights by their owner
        self.made: set[Any] = set()  # weights whose gradient exists
        self.passing: dict[str, int] = {}
        self.masks: list[tuple[str, int]] = []  # of the layout, as numbers

    # --- the whole step ---------------------------------------------------------------------------

    def run(self) -> Ledger:
        """The second step, when moments exist, with as many packs as asked (two stand for more)."""
        s, book = self.s, self.book
        book.phase = "between steps"
        book.take("weights", WIDE * s.weights // s.parts)
        book.take("optimiser", WIDE * s.states // s.parts)
        if s.sharded:  # the outermost group and two layers, this one and the next, are gathered
            gathered = s.weights - (s.layers - min(s.layers, 2)) * s.layer_weights
            book.take("weights", WIDE * gathered)
        self.target()
        if self.cuda and s.packs > 1:  # the next pack is copied while one is computed
            book.take("batch", self.batch_bytes)
        for _ in range(min(s.packs, 2)):
            self.pack()
        # clip_grad_norm_ and the fused AdamW work in place
        return book

    @property
    def batch_bytes(self) -> int:
        """taps_SD in bf16, and last_SH where labels come from the target."""
        s = self.s
        return 2 * s.tokens * s.hidden * (s.taps + (s.labels != "data"))

    def target(self) -> None:
        """gradient.Head: embedding as stored, head in the training's dtype, perhaps fewer rows."""
        s, stored = self.s, BYTES[self.s.target_dtype]
        self.book.take("target", stored * s.vocab * s.hidden)
        rows = s.head_rows or s.vocab
        if not (s.tied and stored == self.e):
            self.book.take("target", self.e * s.vocab * s.hidden)
        if rows < s.vocab:
            self.book.take("target", self.e * rows * s.hidden)

    def pack(self) -> None:
        """pack_loss and its backward pass."""
        s, book, e, rows = self.s, self.book, self.e, self.rows
        book.phase = "forward"
        batch = [book.take("batch", self.batch_bytes)]
        # block_input: embedded in the table's dtype, then float32
        x = [book.take("activations", WIDE * rows * s.hidden)]
        if s.target_dtype != "float32":
            book.swing("activations", BYTES[s.target_dtype] * rows * s.hidden)

        # context: hidden_norm(fc(taps)); fc keeps its input, which float32 training has widened
        taps = [] if self.narrow else [book.take("batch", WIDE * s.tokens * s.taps * s.hidden)]
        fc = self.cast("fc", s.fc)
        context, context_norm = self.linear_norm(s.tokens * s.hidden, "activations")
        ropes = [  # cosine and sine of both streams, kept by every rotation
            book.take("activations", 2 * WIDE * s.head_dim * n) for n in (s.tokens, rows)
        ]
        keeps = s.checkpointing in ("none", "group")
        layers = []
        for i in range(s.layers):
            book.phase = f"forward, layer {i}"
            layers.append(self.layer_forward(i, keeps, selective=s.checkpointing == "selective"))
            x.append(book.take("activations", WIDE * rows * s.hidden))  # the layer's output
        final = self.norm_forward(rows * s.hidden, WIDE, "activations", stays=True)
        hidden = book.take("activations", WIDE * rows * s.hidden)
        if not keeps:  # leaving autocast empties its cache of weights; only what is saved stays
            for owner in [o for o in self.casts if o != "fc"]:
                book.drop(self.casts.pop(owner))

        book.phase = "loss"
        slope = self.loss()
        book.drop(hidden)

        book.phase = "backward, loss"
        supervised = WIDE * s.anchors * (s.block - 1) * s.hidden
        out = book.take("loss", supervised)  # _SlotLosses.backward: grad_RH times the weights
        book.drop(slope)
        g = book.take("activations", WIDE * rows * s.hidden)  # of hidden_NBH[supervised]
        book.drop(out)
        g = self.norm_backward(rows * s.hidden, WIDE, WIDE, "activations", g, final)
        self.gradient("norm", s.hidden)
        book.drop(x.pop())
        context_g = None
        for i in reversed(range(s.layers)):
            book.phase = f"backward, layer {i}"
            if not keeps:
                book.drop(*layers[i].get("inputs", []))
                layers[i] = self.layer_forward(i, True, kept=layers[i].get("memo", []))
            g, context_g = self.layer_backward(i, layers[i], g, context_g)
            book.drop(x.pop())
        book.drop(g, *ropes)

        book.phase = "backward, context"
        g = self.norm_backward(s.tokens * s.hidden, e, e, "activations", context_g, context_norm)
        book.drop(context)
        self.gradient("hidden_norm", s.hidden)
        self.gradient("fc", s.fc)
        book.drop(g, *taps, *batch, *self.masks)
        self.masks = []
        if fc:
            book.drop(self.casts.pop("fc"))

    # --- parts of layers ----------------------------------------------------------------------------

    def cast(self, owner: Any, numbers: int) -> list[tuple[str, int]]:
        """Autocast's bf16 copy of a weight: made at first use, kept by the product for its backward."""
        if not self.narrow or owner in self.casts:
            return []
        self.casts[owner] = self.book.take("weights", self.e * numbers)
        return [self.casts[owner]]

    def gradient(self, owner: Any, numbers: int) -> None:
        """Of a weight: once in the product's dtype, once in float32, which is then `.grad` itself, or is
        added to it."""
        narrow = self.book.take("activations", self.e * numbers) if self.narrow else None
        size = WIDE * numbers
        if owner in self.made:
            self.book.swing("optimiser", size)
        else:
            if self.s.sharded:  # whole, until its parts are handed out
                self.book.swing("optimiser", size)
            self.book.take("optimiser", size // self.s.parts)
            self.made.add(owner)
        if narrow:
            self.book.drop(narrow)

    def norm_forward(
        self, n: int, itemsize: int, term: str, stays: bool = True
    ) -> list[tuple[str, int]]:
        """RMSNorm of n numbers: what it keeps beside an input that is float32 already.

        A bf16 input is widened and that kept. On a GPU rms_norm is one kernel; on a CPU it is written
        out and its last product keeps x / rms(x) as well.
        """
        book = self.book
        kept = [book.take(term, WIDE * n)] if itemsize < WIDE else []
        if not self.cuda:
            book.swing(term, WIDE * n)  # x²
            kept.append(book.take(term, WIDE * n))
        if not stays:
            book.drop(*kept)
            return []
        return kept

    def norm_backward(self, n: int, in_size: int, g_size: int, term: str, g, kept):
        """Gradient of RMSNorm's input, in the input's dtype; lets go of what was kept."""
        book = self.book
        if self.cuda:  # one kernel: the widened gradient and the result
            wide = book.take(term, WIDE * n) if g_size < WIDE else g
            out = book.take(term, WIDE * n)
            if g_size < WIDE:
                book.drop(wide)
            book.drop(g, *kept)
        else:
            # g·w and g·x/rms; then, of x/rms(x): the mean's share, x¹, 2x¹ and their product, while
            # the other share waits
            book.swing(term, 2 * WIDE * n)
            book.drop(g)
            if kept:
                book.drop(kept[-1])
            book.swing(term, 5 * WIDE * n)
            book.drop(*kept[:-1])
            out = book.take(term, WIDE * n)
        if in_size < WIDE:
            small = book.take(term, in_size * n)
            book.drop(out)
            out = small
        return out

    def linear_norm(self, n: int, term: str) -> tuple[tuple[str, int], list[tuple[str, int]]]:
        """A product and the norm of it: (the normed result, what the norm keeps)."""
        book = self.book
        product = book.take(term, self.e * n)
        kept = self.norm_forward(n, self.e, term)
        if self.narrow:  # the result in float32, then narrowed; the product itself is let go of
            wide = book.take(term, WIDE * n)
            result = book.take(term, self.e * n)
            book.drop(wide, product)
        else:
            kept.insert(0, product)
            result = book.take(term, self.e * n)
        return result, kept

    def rotate(self, n: int, term: str) -> tuple[str, int]:
        """drafter.rotate: the halves swapped, two products with the angles and their sum."""
        self.book.swing(term, (self.e + 3 * WIDE) * n)
        return self.book.take(term, self.e * n)

    def rotate_backward(self, n: int, term: str) -> None:
        """Two products and their sum again, in float32."""
        self.book.swing(term, 3 * WIDE * n)

    # --- a layer --------------------------------------------------------------------------------------

    def layer_forward(
        self, i: int, keep: bool, selective: bool = False, kept=()
    ) -> dict[str, list]:
        """Layer.over_pack. Without `keep` (inside a checkpoint) only what it computes with is alive.

        `selective`: attention's result outlives it. `kept`: the result that a recomputation finds there.
        """
        s, book, e, rows = self.s, self.book, self.e, self.rows
        act, att = "activations", "attention"
        held: dict[str, list] = {}

        def hold(name: str, *things) -> None:
            held.setdefault(name, []).extend(t for t in things if t is not None)

        # context keys and values
        self.cast((i, "k"), s.hidden * self.kv)
        self.cast((i, "v"), s.hidden * self.kv)
        k, norm = self.linear_norm(s.tokens * self.kv, att)
        if keep:
            hold("k_S norm", *norm)
        else:
            book.drop(*norm)
        hold("kernel", book.take(att, e * s.tokens * self.kv))  # v_SKd
        hold("kernel", self.rotate(s.tokens * self.kv, att))  # k_SKd
        book.drop(k)

        # input_layernorm; in bf16 each of three products makes its own narrow copy of the result
        norm = self.norm_forward(rows * s.hidden, WIDE, act, stays=keep)
        hold("norm 1", *norm)
        y = book.take(act, WIDE * rows * s.hidden)
        self.cast((i, "q"), s.hidden * self.q)
        if self.narrow:
            for name in ("q", "k", "v"):
                copy = book.take(act, e * rows * s.hidden)
                if keep:
                    hold(f"{name} input", copy)
                else:
                    book.drop(copy)
        q, norm = self.linear_norm(rows * self.q, att)
        if keep:
            hold("q norm", *norm)
        else:
            book.drop(*norm)
        hold("kernel", self.rotate(rows * self.q, att))  # q_NBQd
        k, norm = self.linear_norm(rows * self.kv, att)
        if keep:
            hold("k_N norm", *norm)
        else:
            book.drop(*norm)
        hold("kernel", book.take(att, e * rows * self.kv))  # v_NBKd
        hold("kernel", self.rotate(rows * self.kv, att))  # k_NBKd
        book.drop(k)

        # the normed queries and, in bf16, the wide normed input are names that wait for attention
        found, out = self.attention_forward(keep, selective, list(kept))
        for name, things in found.items():
            hold(name, *things)
        hold("out", out)
        book.drop(q)
        self.cast((i, "o"), self.q * s.hidden)
        o = book.take(act, e * rows * s.hidden)
        if self.narrow or not keep:
            book.drop(y)
        else:
            hold("qkv input", y)
        middle = book.take(act, WIDE * rows * s.hidden)  # x + attention
        book.drop(o)
        if not keep:
            book.drop(*held.pop("kernel"))
            out = held.pop("out")
            if "memo" not in held:
                book.drop(*out)

        # post_attention_layernorm and MLP: keeps gate, silu(gate), up and their product
        hold("norm 2", *self.norm_forward(rows * s.hidden, WIDE, act, stays=keep))
        y = book.take(act, WIDE * rows * s.hidden)
        for name in ("gate", "up", "down"):
            self.cast((i, name), s.hidden * s.intermediate)
        if self.narrow:
            for name in ("gate", "up"):
                copy = book.take(act, e * rows * s.hidden)
                if keep:
                    hold(f"{name} input", copy)
                else:
                    book.drop(copy)
        inner = e * rows * s.intermediate
        mlp = [book.take(act, inner) for _ in range(3 if not keep else 4)]
        if keep:
            hold("mlp", *mlp)
            hold("middle", middle)
            if self.narrow:
                book.drop(y)
            else:
                hold("mlp input", y)
        else:
            book.drop(*mlp, y, middle)
        if not kept:  # the recomputation stops before the last product
            book.swing(act, e * rows * s.hidden)
        return held

    def layer_backward(self, i: int, held: dict[str, list], g, context_g):
        """In the order of autograd: what came last first. Returns the gradients of x and context."""
        s, book, e, rows = self.s, self.book, self.e, self.rows
        act, att = "activations", "attention"
        wide, small, inner = WIDE * rows * s.hidden, e * rows * s.hidden, e * rows * s.intermediate

        def done(name: str) -> None:
            book.drop(*held.pop(name, []))

        def branch_gradient(so_far, owner: str, numbers: int):
            """Of a product's input: added to those of other products of it."""
            self.gradient((i, owner), numbers)
            new = book.take(act, small)
            if self.narrow:
                book.take(act, wide)
                book.drop(new)
                new = (act, wide)
            done(f"{owner} input")
            if so_far is None:
                return new
            total = book.take(act, wide)
            book.drop(so_far, new)
            return total

        # down, then silu(gate)·up, up, silu, gate
        g_branch = book.take(act, small) if self.narrow else None
        self.gradient((i, "down"), s.hidden * s.intermediate)
        g_product = book.take(act, inner)
        gate, silu, up, product = held.pop("mlp")
        book.drop(product)
        if g_branch:
            book.drop(g_branch)
        g_silu, g_up = book.take(act, inner), book.take(act, inner)
        book.drop(g_product, silu, up)
        g_y = branch_gradient(None, "up", s.hidden * s.intermediate)
        book.drop(g_up)
        g_gate = book.take(act, inner)
        book.drop(g_silu, gate)
        g_y = branch_gradient(g_y, "gate", s.hidden * s.intermediate)
        book.drop(g_gate)
        done("mlp input")
        for name in ("gate", "up", "down"):
            self.uncast((i, name))
        g_norm = self.norm_backward(rows * s.hidden, WIDE, WIDE, act, g_y, held.pop("norm 2", []))
        total = book.take(act, wide)
        book.drop(g, g_norm)
        done("middle")
        g = total

        # o_proj, attention
        g_branch = book.take(act, small) if self.narrow else None
        self.gradient((i, "o"), self.q * s.hidden)
        g_out = book.take(att, e * rows * self.q)
        if g_branch:
            book.drop(g_branch)
        self.uncast((i, "o"))
        gradients = self.attention_backward(held, g_out)
        g_q, g_k, g_v, g_k_S, g_v_S = gradients
        done("kernel")
        done("out")

        # values, keys and queries of the block stream
        g_y = branch_gradient(None, "v", s.hidden * self.kv)
        book.drop(g_v)
        self.rotate_backward(rows * self.kv, att)
        g_k = self.norm_backward(rows * self.kv, e, e, att, g_k, held.pop("k_N norm"))
        g_y = branch_gradient(g_y, "k", s.hidden * self.kv)
        book.drop(g_k)
        self.rotate_backward(rows * self.q, att)
        g_q = self.norm_backward(rows * self.q, e, e, att, g_q, held.pop("q norm"))
        g_y = branch_gradient(g_y, "q", s.hidden * self.q)
        book.drop(g_q)
        self.uncast((i, "q"))
        done("qkv input")
        g_norm = self.norm_backward(rows * s.hidden, WIDE, WIDE, act, g_y, held.pop("norm 1", []))
        total = book.take(act, wide)
        book.drop(g, g_norm)
        g = total

        # the context's keys and values; its gradient collects over all layers
        size = e * s.tokens * s.hidden
        self.rotate_backward(s.tokens * self.kv, att)
        for owner in ("v", "k"):
            if owner == "k":
                g_k_S = self.norm_backward(
                    s.tokens * self.kv, e, e, att, g_k_S, held.pop("k_S norm")
                )
            self.gradient((i, owner), s.hidden * self.kv)
            new = book.take(act, size)
            book.drop(g_v_S if owner == "v" else g_k_S)
            if context_g is not None:
                book.take(act, size)
                book.drop(context_g, new)
                new = (act, size)
            context_g = new
            self.uncast((i, owner))
        self.gradient((i, "norms"), 2 * s.hidden + 2 * s.head_dim)
        return g, context_g

    def uncast(self, owner: Any) -> None:
        if owner in self.casts:
            self.book.drop(self.casts.pop(owner))

    # --- attention ------------------------------------------------------------------------------------

    def attention_forward(self, keep: bool, selective: bool, kept: list):
        """attention.attend: (what stays for the backward pass by name, the output).

        `selective`: the memo keeps output and log-sum-exp. `kept`: a recomputation takes them from there.
        """
        s, book, e, rows = self.s, self.book, self.e, self.rows
        recompute = s.checkpointing in ("group", "both")
        term = "attention"
        found: dict[str, list] = {}
        if s.backend in ("chunked", "split"):
            if kept:
                out, lse = kept
                return {"lse": [lse]}, out
            self.biases()
            out = book.take(term, e * rows * self.q)
            lse = book.take(term, WIDE * rows * s.heads)
            book.swing(term, self.in_passing(self.groups_forward))
            if selective:
                found["memo"] = [out, lse]
            elif keep and not recompute:
                found["lse"] = [lse]
            else:
                book.drop(lse)
            return found, out
        if s.backend == "dense":
            things = self.dense_forward()
            out = book.take(term, e * rows * self.q)
            if keep and not recompute:
                found["dense"] = things
            else:
                book.drop(*things)
            return found, out
        pieces, outs = [], []
        for c, length in self.gather_chunks():
            piece = self.gather_forward(c, length)
            outs.append(piece[-1])
            if keep and not recompute:
                pieces.append(piece)
            else:  # a checkpoint or no graph: the outputs wait for the concatenation
                book.drop(*piece[:-1])
        out = book.take(term, e * rows * self.q)
        if pieces:
            found["gather"] = pieces
        else:
            book.drop(*outs)
        return found, out

    def attention_backward(self, held: dict[str, list], g_out):
        """Gradients of queries, block keys and values, context keys and values, in e."""
        s, book, e, rows = self.s, self.book, self.e, self.rows
        term = "attention"
        recompute = s.checkpointing in ("group", "both")
        n, m = s.tokens * self.kv, rows * self.kv
        if s.backend in ("chunked", "split"):
            g_q, g_k, g_v = (book.take(term, e * x) for x in (rows * self.q, m, m))
            wide = [book.take(term, WIDE * n) for _ in range(2)]  # dk_S, dv_S: many groups add
            book.swing(term, self.in_passing(self.groups_backward))
            book.drop(*held.pop("lse", []), g_out)
            if not self.narrow:
                return g_q, g_k, g_v, *wide
            small = [book.take(term, e * n) for _ in range(2)]
            book.drop(*wide)
            return g_q, g_k, g_v, *small
        if s.backend == "dense":
            things = self.dense_forward() if recompute else held.pop("dense")
            self.dense_backward(things)
            book.drop(g_out)
            return tuple(book.take(term, e * x) for x in (rows * self.q, m, m, n, n))
        totals = [book.take(term, e * x) for x in (rows * self.q, m, m, n, n)]
        pieces = held.pop("gather", None)
        for c, length in reversed(list(self.gather_chunks())):
            piece = self.gather_forward(c, length) if pieces is None else pieces.pop()
            keys = length + s.block
            slope = book.take(term, e * c * s.block * self.q)  # folded
            new = [book.take(term, e * c * keys * self.kv) for _ in range(2)]
            new.append(book.take(term, e * c * s.block * self.q))
            if self.cuda and self.narrow:  # the kernel adds up in float32
                book.swing(term, WIDE * c * (2 * keys * self.kv + s.block * self.q))
            book.drop(*piece, slope)
            # one chunk's share as a tensor of full size, and the sum with the others'
            for x in (n, n, m, m, rows * self.q):
                book.swing(term, 2 * e * x)
            book.drop(*new)
        book.drop(g_out)
        return totals

    def calls(self, g: Group) -> list[tuple[int, bool, bool]]:
        """(keys, whether they are copied together, whether masked) of a group's kernel calls."""
        out = []
        for ranges, own in _calls(g, self.s.backend == "split"):
            keys = sum(high - low for low, high in ranges)
            keys += (g.last - g.first) * self.s.block if own else 0
            out.append((keys, own or len(ranges) > 1, own))
        return out

    def biases(self) -> None:
        """Layout.parts: every group's mask as numbers, made at first use, shared by all layers."""
        if self.masks:
            return
        s = self.s
        for g in self.groups:
            for keys, _, masked in self.calls(g):
                if masked:
                    size = (g.last - g.first) * s.block * keys
                    self.book.swing("attention", (self.e + 2) * size)  # bool, its inverse, numbers
                    self.masks.append(self.book.take("attention", self.e * size))

    def call_bytes(self, r: int, keys: int, copied: bool, masked: bool) -> tuple[int, int]:
        """Keys and values copied for a call, and its mask repeated for the G heads folded into rows."""
        e, s = self.e, self.s
        copies = 2 * e * keys * self.kv if copied else 0
        bias = e * r * (s.heads // s.kv_heads) * keys if masked else 0
        return copies, bias * (2 if self.cuda else 1)  # attention._aligned pads a copy

    def in_passing(self, run: Callable[[], None]) -> int:
        """The peak of something that leaves nothing behind; the same for all layers."""
        if run.__name__ not in self.passing:
            book, self.book = self.book, Ledger()
            run()
            self.passing[run.__name__], self.book = self.book.peak, book
        return self.passing[run.__name__]

    def groups_forward(self) -> None:
        """The loop of _Grouped.forward."""
        for g in self.groups:
            self.group_forward(g)

    def groups_backward(self) -> None:
        """The loop of _Grouped.backward; a group's last names hold until the next one's are made."""
        before: list[tuple[str, int]] = []
        for g in self.groups:
            before = self.group_backward(g, before)

    def group_forward(self, g: Group) -> None:
        """One group's rows through its kernel calls."""
        s, book, e = self.s, self.book, self.e
        r = (g.last - g.first) * s.block
        folded = e * r * self.q
        rows = book.take("attention", folded)
        results = []
        for keys, copied, masked in self.calls(g):
            copies, bias = self.call_bytes(r, keys, copied, masked)
            results.append(book.take("attention", folded + WIDE * r * s.heads))
            book.swing("attention", copies + bias)
        if len(results) > 1:  # both outputs scaled in float32 and added
            book.swing("attention", 3 * WIDE * r * self.q)
        book.swing("attention", folded)  # unfolded
        book.drop(rows, *results)

    def group_backward(self, g: Group, before: list) -> list:
        """One group of _Grouped.backward; returns what Python's names still hold afterwards."""
        s, book, e, term = self.s, self.book, self.e, "attention"
        r = (g.last - g.first) * s.block
        folded = e * r * self.q
        names = [book.take(term, folded) for _ in range(2)]  # rows, slope
        if s.checkpointing in ("group", "both"):
            self.group_forward(g)
        names.append(book.take(term, folded))  # out
        for keys, copied, masked in self.calls(g):
            copies, bias = self.call_bytes(r, keys, copied, masked)
            kv = book.take(term, copies)
            mask = book.take(term, bias)
            # gradients of rows, keys and values while the last call's still have their names
            new = book.take(term, folded + 2 * e * keys * self.kv)
            if self.cuda and self.narrow:  # kernels add gradients up in float32
                book.swing(term, WIDE * (r * self.q + 2 * keys * self.kv))
            book.drop(*before, mask)
            before = [new, kv]
        book.swing(term, folded)  # unfolded
        book.drop(*names)
        return before

    def gather_chunks(self) -> Iterator[tuple[int, int]]:
        """(blocks, context rows of the longest one) of each chunk of `_gather`."""
        for first in range(0, self.s.anchors, GATHER_BLOCKS):
            before = self.before_N[first : first + GATHER_BLOCKS]
            yield len(before), max(1, max(before))

    def gather_forward(self, c: int, length: int) -> list[tuple[str, int]]:
        """_gather_chunk: what its backward keeps, the output last."""
        s, book, e, term = self.s, self.book, self.e, "attention"
        keys, rows = length + s.block, c * s.block
        kept = [book.take(term, 8 * c * length)]  # at: a row of the context for each copy
        book.swing(term, (8 + 1) * c * length + 2 * rows * keys)  # row_CL, its mask
        for _ in range(2):  # k, v: k_S[at], then with the block's own
            picked = book.take(term, e * c * length * self.kv)
            kept.append(book.take(term, e * c * keys * self.kv))
            book.drop(picked)
        kept.append(book.take(term, e * rows * self.q))  # queries folded
        heads = s.heads // s.kv_heads
        book.swing(term, (1 + e) * rows * heads * keys)  # the repeated mask, then as numbers
        kept.append(book.take(term, e * rows * heads * keys))
        kept.append(book.take(term, e * rows * self.q + WIDE * rows * s.heads))  # out, lse
        return kept

    def dense_forward(self) -> list[tuple[str, int]]:
        """_dense: mask, keys and values repeated for all query heads, and the softmax stay."""
        s, book, e, term = self.s, self.book, self.e, "attention"
        keys = s.tokens + self.rows
        kept = [book.take(term, self.rows * keys)]
        for _ in range(2):
            book.swing(term, e * keys * (self.kv + self.q))
            kept.append(book.take(term, e * keys * self.q))
        scores = s.heads * self.rows * keys
        passing = [book.take(term, e * scores), book.take(term, e * scores)]  # scaled, masked
        if self.cuda and self.narrow:  # autocast widens softmax there
            passing.append(book.take(term, WIDE * scores))
            kept += [book.take(term, WIDE * scores), book.take(term, e * scores)]
        else:
            kept.append(book.take(term, e * scores))
        book.drop(*passing)
        return kept

    def dense_backward(self, kept: list[tuple[str, int]]) -> None:
        s, book, e = self.s, self.book, self.e
        keys = s.tokens + self.rows
        wide = WIDE if self.cuda and self.narrow else e
        scores = s.heads * self.rows * keys
        values = book.take("attention", e * keys * self.q)  # dv
        slopes = [book.take("attention", e * scores), book.take("attention", wide * scores)]
        book.drop(*kept, *slopes)
        book.swing("attention", 2 * e * scores + e * keys * (self.q + self.kv))
        book.drop(values)

    # --- loss -------------------------------------------------------------------------------------------

    def loss(self):
        """dflash.loss.block_loss; returns grad_RH, all that it keeps."""
        s, book, e = self.s, self.book, self.e
        vocab = s.head_rows or s.vocab
        rows = s.anchors * (s.block - 1)  # slot 0 predicts nothing
        hidden = book.take("loss", WIDE * rows * s.hidden)  # hidden_NBH[supervised_NB]
        slope = book.take("loss", WIDE * rows * s.hidden)
        c = min(rows, s.loss_rows or rows_within(s.device, vocab))
        logits = (
            (WIDE + (e if self.narrow else 0)) * c * vocab
        )  # in e, then float32; at the end again
        if s.labels == "soft":  # the target's distribution beside it
            logits += WIDE * c * vocab
        book.swing("loss", logits + (WIDE + e) * c * s.hidden)
        book.drop(hidden)
        return slope


def estimate(shape: Shape) -> Ledger:
    """The peak of one training step. Raises UserError for what cannot be planned."""
    if shape.backend not in PLANNED:
        raise UserError(
            f"attention backend {shape.backend} cannot be planned (its kernels are compiled); choose one "
            f"of {', '.join(PLANNED)}"
        )
    if shape.checkpointing not in CHECKPOINTING:
        raise UserError(
            f"no checkpointing {shape.checkpointing!r}; there are {', '.join(CHECKPOINTING)}"
        )
    if not 1 <= shape.anchors <= shape.tokens or shape.documents > shape.anchors:
        raise UserError(
            f"{shape.anchors} anchors in {shape.documents} documents of {shape.tokens} tokens: expected "
            "at least one a document and at most one a token"
        )
    return Step(shape).run()


# --- the largest that fits ------------------------------------------------------------------------


def card_bytes(card_gb: float) -> float:
    """Memory of a card: what one sold as so many GB has, else GB of 10^9 bytes."""
    return CARDS[card_gb] * 2**20 if card_gb in CARDS else card_gb * GB


def usable(card_gb: float, ranks: int = 1) -> float:
    """Bytes of a card that a step may take: what context, NCCL and fragmentation leave."""
    taken = CONTEXT_BYTES + (NCCL_BYTES if ranks > 1 else 0)
    return (card_bytes(card_gb) - taken) * (1 - FRAGMENTATION)


def largest_anchors(shape: Shape, card_gb: float, tokens: int) -> int:
    """Most anchors whose step over `tokens` fits a card, in whole STEPs up to one a token; 0 if none."""
    limit = usable(card_gb, shape.ranks)

    def fits(steps: int) -> bool:
        return _peak(replace(shape, tokens=tokens, anchors=min(STEP * steps, tokens))) <= limit

    low, high = 0, -(-tokens // STEP)
    if fits(high):
        return tokens
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return STEP * low


def fixed_bytes(shape: Shape) -> int:
    """What a step takes however small the pack is: weights, moments, gradients, the target's tensors."""
    step = Step(shape)
    step.target()
    return step.book.peak + WIDE * (2 * shape.weights + shape.states) // shape.parts


@lru_cache(maxsize=4096)
def _peak(shape: Shape) -> int:
    return estimate(shape).peak


# --- disk -----------------------------------------------------------------------------------------


# Bytes on disk of a number, by codec, in the taps and in the last hidden state: as measured on the
# demo's features (docs/features.md).
STORED = {"raw": (2, 2), "compact": (1.4, 1.4), "int8": (1.03, 1.4)}


def bytes_a_token(taps: int, hidden: int, last_hidden: bool, codec: config.Codec = "raw") -> int:
    """On disk: the taps, perhaps the last hidden state, an int32 id and a bool (dflash.features)."""
    tap, last = STORED[codec]
    return round(hidden * (taps * tap + last_hidden * last)) + 4 + 1


def longest_document(workflow: config.Workflow) -> int:
    """Tokens of a document whose prompt and answer are as long as the settings allow."""
    longest = workflow.corpus.max_prompt_tokens + workflow.regenerate.max_new_tokens
    return min(longest, workflow.extract.max_tokens)


def count_tokens(workflow: config.Workflow) -> tuple[int, int, str]:
    """(documents, tokens, how they are known) of the training corpus.

    Counted where every source has been answered, else the most there can be: every prompt and every
    answer as long as allowed.
    """
    import pyarrow.parquet as pq

    limit = workflow.extract.max_tokens
    folder = Path(workflow.results) / "tokens"
    files = [
        folder / source.name / f"{shard}.parquet"
        for source in workflow.corpus.sources
        for shard in config.shard_names(source.shards)
    ]
    if all(f.is_file() for f in files):
        lengths = [
            min(len(ids), limit)
            for f in files
            for ids in pq.read_table(f, columns=["input_ids"])["input_ids"]
        ]
        return len(lengths), sum(lengths), f"counted in {folder}"
    prompts = 0
    for source in workflow.corpus.sources:
        path = Path(source.path)
        if not path.is_file():
            raise UserError(
                f"corpus.sources: {source.name}: no file {path}; the plan counts its prompts: check the "
                "path, and run from the folder that relative paths start from"
            )
        if path.suffix == ".parquet":
            rows = pq.read_metadata(path).num_rows
        else:
            with open(path, "rb") as f:
                rows = sum(bool(line.strip()) for line in f)
        prompts += min(rows, source.limit or rows)
    documents = round(prompts * (1 - workflow.corpus.heldout_share))
    longest = longest_document(workflow)
    how = (
        f"at most: {prompts:,} prompts, {workflow.corpus.heldout_share:.0%} of them held out, each with "
        f"prompt and answer as long as allowed ({longest:,} tokens)"
    )
    return documents, documents * longest, how


def disk(workflow: config.Workflow, drafter: config.Drafter) -> dict[str, Any]:
    """What extraction writes and an epoch of a drafter's training reads."""
    facts = config.target_facts(workflow.target)
    layers, hidden = facts.num_hidden_layers, facts.hidden_size
    taps = sorted({t for d in workflow.drafters.values() for t in config.tap_ids(d, layers)})
    last = any(config.needs_last_hidden(d) for d in workflow.drafters.values())
    documents, tokens, how = count_tokens(workflow)
    row = 2 * hidden * len(taps)
    # Chunks are read whole: a document begins and ends inside one, and every tap is in it.
    codec = workflow.extract.codec
    chunk = chunks_of(max(1, tokens), row, CHUNK_BYTES[codec])[0]
    read_row = bytes_a_token(len(taps), hidden, config.needs_last_hidden(drafter), codec) - 5
    epoch = (tokens + documents * (chunk - 1)) * read_row
    return {
        "documents": documents,
        "tokens": tokens,
        "tokens_known": how,
        "taps": len(taps),
        "last_hidden": last,
        "bytes_a_token": bytes_a_token(len(taps), hidden, last, codec),
        # offsets and sample ids are 24 bytes a document
        "extraction_bytes": tokens * bytes_a_token(len(taps), hidden, last, codec) + 24 * documents,
        "epoch_bytes": epoch,
        "training_bytes": round(epoch * drafter.training.epochs),
    }


# --- from the settings ----------------------------------------------------------------------------

# What the facts of the embedded target do not say; the target stage writes it to identity.json.
EMBEDDED = {"embedded:smollm2-135m-instruct": {"intermediate_size": 1536, "head_dim": 64}}


def target_geometry(workflow: config.Workflow) -> dict[str, Any]:
    """What is known of the target's widths: from its own stage's result, its folder, or its facts."""
    target = workflow.target
    facts = config.target_facts(target).model_dump()
    identity = Path(workflow.results) / "target" / "identity.json"
    paths = [identity]
    if is_folder(target.model):
        paths.append(Path(target.model).expanduser() / "config.json")
    for path in paths:
        if path.is_file():
            found = json.loads(path.read_text(encoding="utf-8"))
            found = found.get("text_config") or found
            facts |= {k: v for k, v in found.items() if v is not None}
            break
    else:
        facts |= EMBEDDED.get(target.model, {})
    return facts


def shape_of(
    workflow: config.Workflow,
    name: str,
    tokens: int | None = None,
    anchors: int | None = None,
    device: str = "cuda",
) -> Shape:
    """The largest pack that a drafter's settings make, or one document of the given size.

    Raises UserError for an unknown drafter and for a width that nothing tells.
    """
    if name not in workflow.drafters:
        raise UserError(
            f"--drafter: no drafter {name!r} in the settings; there are {', '.join(workflow.drafters)}"
        )
    d, machine, target = workflow.drafters[name], workflow.machine.train, target_geometry(workflow)

    def width(key: str) -> int:
        value = getattr(d, key) or target.get(key)
        if value is None and key == "head_dim" and target.get("num_attention_heads"):
            value = target["hidden_size"] // target["num_attention_heads"]  # as transformers has it
        if value is None:
            raise UserError(
                f"drafters.{name}.{key}: not stated, and the target's is not known before its stage has "
                "run; state it, or run the target stage first"
            )
        return value

    if tokens is not None and anchors is not None and anchors > tokens:
        raise UserError(
            f"--anchors: found {anchors}, more than --tokens {tokens}; allowed: at most one a token"
        )
    given = tokens is not None or anchors is not None
    longest = longest_document(workflow)
    per_step = d.training.documents_per_step
    ranks = max(1, machine.gpu) if device == "cuda" else 1
    of_rank = -(-per_step // ranks)
    documents = 1 if given else min(machine.micro_batch, of_rank)
    tokens = tokens or machine.pad_context or documents * longest
    anchors = anchors or machine.pad_blocks or documents * d.training.anchors_per_document
    loss = d.training.loss
    return Shape(
        tokens=tokens,
        anchors=min(anchors, tokens),
        block=d.block_size,
        layers=d.num_hidden_layers,
        hidden=target["hidden_size"],
        heads=width("num_attention_heads"),
        kv_heads=width("num_key_value_heads"),
        head_dim=width("head_dim"),
        intermediate=width("intermediate_size"),
        vocab=target["vocab_size"],
        taps=len(config.tap_ids(d, target["num_hidden_layers"])),
        dtype=d.training.dtype,
        device=device,
        backend=machine.attention,
        checkpointing=machine.checkpointing,
        documents=documents,
        packs=-(-of_rank // documents),
        head_rows=loss.head_tokens,
        tied=target.get("embedding_tensor", 0) == target.get("head_tensor", 1),
        labels=loss.labels,
        loss_rows=machine.loss_rows,
        group_rows=machine.group_rows,
        group_mb=machine.group_mb,
        window=d.sliding_window,
        optimizer=d.training.optimizer,
        averaged=d.training.ema is not None,
        ranks=ranks,
        sharded=machine.sharding == "fsdp" and ranks > 1,
    )


# --- where the project started --------------------------------------------------------------------

START = Shape(
    tokens=8000,
    anchors=1024,
    block=16,
    layers=5,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=12288,
    vocab=151936,
    taps=5,
)


def starting_point() -> dict[str, Any]:
    """The arithmetic of the run that died of 128 GB, and what the same step takes here.

    It gathered keys and values for every block in chunks of 45, each padded to the whole context, with
    the key heads repeated for all query heads, and without checkpointing autograd kept them all.
    """
    s = START
    chunks = math.ceil(s.anchors / GATHER_BLOCKS)
    a_block = (s.tokens + s.block) * s.heads * s.head_dim * BYTES[s.dtype]
    return {
        "blocks_in_a_chunk": GATHER_BLOCKS,
        "chunks": chunks,
        "chunk_bytes": GATHER_BLOCKS * a_block,  # of keys; values take as much
        "layer_bytes": 2 * s.anchors * a_block,
        "all_layers_bytes": 2 * s.layers * s.anchors * a_block,
        "gather_bytes": estimate(replace(s, backend="gather", checkpointing="none")).peak,
        "peaks": peaks(s),
        "terms": dict(estimate(s).at_peak),
    }


def peaks(shape: Shape) -> dict[str, dict[str, int]]:
    """Peak bytes by backend and checkpointing."""
    return {
        b: {c: _peak(replace(shape, backend=b, checkpointing=c)) for c in CHECKPOINTING}
        for b in PLANNED
    }


# --- output ---------------------------------------------------------------------------------------


def plan(
    workflow: config.Workflow,
    name: str,
    tokens: int | None = None,
    anchors: int | None = None,
    card: float | None = None,
) -> dict[str, Any]:
    """Everything the plan says, as plain data. Raises UserError where a step does not fit `card`."""
    shape = shape_of(workflow, name, tokens, anchors)
    ledger = estimate(shape)
    columns = sorted({shape.tokens, 4096, 8192, 16384, 32768} if not tokens else {tokens})
    one = replace(shape, documents=1)
    cards = [card] if card else CARDS
    room = usable(card, shape.ranks) if card else 0.0
    if card and ledger.peak > room:
        most = largest_anchors(shape, card, shape.tokens)
        remedy = (
            f"at most {most} anchors fit: lower machine.train.micro_batch or anchors_per_document"
            if most >= shape.documents
            else f"even {STEP} anchors do not fit: lower machine.train.micro_batch or extract.max_tokens"
        )
        if fixed_bytes(shape) > room:
            remedy = "weights and optimiser alone do not fit: choose a larger card or fewer layers"
        raise UserError(
            f"drafters.{name}: a step over {shape.tokens:,} tokens and {shape.anchors:,} anchors takes "
            f"{ledger.peak / GB:.1f} GB ({shape.backend} attention, checkpointing {shape.checkpointing}); "
            f"a card of {card:g} GB leaves {room / GB:.1f}; {remedy}"
        )
    return {
        "drafter": name,
        "shape": asdict(shape),
        "group_rows": group_rows(shape),
        "peak_bytes": ledger.peak,
        "peak_when": ledger.when,
        "terms": ledger.at_peak,
        "peaks": peaks(shape),
        "reserve": {
            "context_bytes": CONTEXT_BYTES,
            "nccl_bytes": NCCL_BYTES if shape.ranks > 1 else 0,
            "fragmentation": FRAGMENTATION,
        },
        "fixed_bytes": fixed_bytes(shape),
        "largest_anchors": {
            f"{c:g}": {str(t): largest_anchors(one, c, t) for t in columns} for c in cards
        },
        "disk": disk(workflow, workflow.drafters[name])
        | {"checkpoint_bytes": WIDE * (shape.weights + shape.states)}
        | {"checkpoints": workflow.machine.train.keep_last + 1},
        "starting_point": starting_point(),
    }


def size(n: float) -> str:
    """Bytes for reading: three digits, decimal units."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if n < 999.5 or unit == "TB":
            return f"{n:.3g} {unit}" if unit != "B" else f"{n:.0f} B"
        n /= 1000
    raise AssertionError


def peak_table(found: dict[str, dict[str, int]]) -> list[str]:
    """Peaks by backend and checkpointing, in GB."""
    lines = [f"  {'GB':<10}" + "".join(f"{c:>11}" for c in CHECKPOINTING)]
    for backend, row in found.items():
        lines.append(f"  {backend:<10}" + "".join(f"{row[c] / GB:>11.1f}" for c in CHECKPOINTING))
    return lines


def text(found: dict[str, Any]) -> str:
    """The plan for reading."""
    s, d, start = found["shape"], found["disk"], found["starting_point"]
    out = [
        f"drafter {found['drafter']}: a pack of {s['tokens']:,} tokens in {s['documents']} document(s), "
        f"{s['anchors']:,} anchors, block {s['block']}, {s['layers']} layers, {s['dtype']} products"
        + (f", on each of {s['ranks']} GPUs" if s["ranks"] > 1 else ""),
        "",
        f"Memory of one step on a GPU, {s['backend']} attention, checkpointing {s['checkpointing']}: "
        f"{size(found['peak_bytes'])} (peak in: {found['peak_when']})",
        *(f"  {size(v):>9}  {k:<12} {TERMS[k]}" for k, v in found["terms"].items()),
        "",
        "The same step with other backends and checkpointing:",
        *peak_table(found["peaks"]),
        "",
        f"{size(found['fixed_bytes'])} of it is there however small the pack: weights, moments, gradients, "
        "embedding and head.",
        f"Most anchors that fit ({s['backend']}, {s['checkpointing']}; one document of so many tokens; "
        f"{size(CONTEXT_BYTES)} and {FRAGMENTATION:.0%} of the card left for the CUDA context and the "
        "allocator" + (f", {size(NCCL_BYTES)} for NCCL" if s["ranks"] > 1 else "") + "):",
    ]
    rows = found["largest_anchors"]
    columns = list(next(iter(rows.values())))
    out.append(f"  {'card':<10}" + "".join(f"{int(t):>11,}" for t in columns))
    for card, row in rows.items():
        cells = "".join(f"{row[t] or '-':>11}" for t in columns)
        out.append(f"  {card + ' GB':<10}{cells}")
    last = " and the last hidden state" if d["last_hidden"] else ""
    peaks_of = start["peaks"]
    out += [
        "",
        f"Disk: {d['documents']:,} documents, {d['tokens']:,} tokens ({d['tokens_known']})",
        f"  {size(d['extraction_bytes']):>9}  written by extract: {d['bytes_a_token']:,} bytes a token for "
        f"{d['taps']} taps{last}",
        f"  {size(d['epoch_bytes']):>9}  read in an epoch of this drafter, chunks being read whole; "
        f"{size(d['training_bytes'])} in its training",
        f"  {size(d['checkpoints'] * d['checkpoint_bytes']):>9}  at most in its run directory: the newest "
        f"{d['checkpoints'] - 1} checkpoints and the best one, {size(d['checkpoint_bytes'])} each",
        "",
        f"Where the project started ({START.tokens:,} tokens, {START.anchors:,} anchors, block "
        f"{START.block}, {START.layers} layers of Qwen3-8B geometry, bf16):",
        f"  keys of one chunk of {start['blocks_in_a_chunk']} blocks, gathered for all {START.heads} heads: "
        f"{start['blocks_in_a_chunk']} x {START.tokens + START.block:,} x {START.heads} x {START.head_dim} "
        f"x 2 bytes = {start['chunk_bytes'] / 2**30:.2f} GiB; values as much",
        f"  kept by one layer, {start['chunks']} chunks: {start['layer_bytes'] / 2**30:.0f} GiB, so the "
        f"first layer alone was too much; all {START.layers}: {start['all_layers_bytes'] / 2**30:.0f} GiB",
        f"  the gather backend here, which copies only the {START.kv_heads} key heads up to a chunk's last "
        f"anchor: {size(start['gather_bytes'])} in all",
        f"  {START.backend} attention: {size(peaks_of[START.backend]['none'])} in all without "
        f"checkpointing, {size(peaks_of[START.backend]['layer'])} with checkpointing layer",
    ]
    return "\n".join(out)


def main(argv: list[str] | None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m dflash.plan",
        description="What a training will cost: memory of a step, disk, bytes to read.",
    )
    parser.add_argument("--config", required=True, help="the workflow's settings file")
    parser.add_argument("--drafter", help="which one (default: the first)")
    parser.add_argument("--tokens", type=_positive, help="context rows of a pack (one document)")
    parser.add_argument("--anchors", type=_positive, help="blocks of a pack")
    parser.add_argument(
        "--card", type=_size, metavar="GB", help="only this card; refuse if too small"
    )
    parser.add_argument("--json", action="store_true", help="all figures as JSON, in bytes")
    args = parser.parse_args(argv)
    workflow = config.load(args.config)
    name = args.drafter or next(iter(workflow.drafters))
    found = plan(workflow, name, args.tokens, args.anchors, args.card)
    print(json.dumps(found, indent=2) if args.json else text(found))


def _positive(value: str) -> int:
    if not value.isdecimal() or not 1 <= int(value) <= MOST:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 to {MOST}, found {value}")
    return int(value)


def _size(value: str) -> float:
    try:
        size = float(value)
    except ValueError:
        size = math.nan
    if not (math.isfinite(size) and size > 0):
        raise argparse.ArgumentTypeError(f"expected a size in GB above 0, found {value}")
    return size


if __name__ == "__main__":
    entrypoint(main)
