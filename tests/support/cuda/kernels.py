"""CUDA's attention kernels on the emulated device: right results where the real ones give them, and
what the real ones do where an argument does not lie as they assume.

They read memory as the kernels do, not through strides the kernels are never told, and refuse what
those refuse. Sources: torch's aten/src/ATen/native/transformers/cuda/{attention.cu, attention_backward.cu,
sdp_utils.cpp} and mem_eff_attention/kernel_{forward,backward}.h (in torch's own include folder).

Legend: B batch · H heads · M query rows · N keys · d head width.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from typing import Any

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)
LSE_ROWS = 32  # kAlignLSE: the efficient kernels keep and read so many rows of log-sum-exp at once
MATH, FLASH, EFFICIENT, CUDNN = 0, 1, 2, 3  # torch.nn.attention.SDPBackend

calls: Counter[str] = Counter()  # of each kernel
plans: set[tuple] = set()  # of cuDNN; a new one takes the host tens of milliseconds
_prefer_cudnn: bool | None = None  # read once, at the first call, as sdp_utils.cpp does


def refuse(found: bool, what: str) -> None:
    """Raise as TORCH_CHECK does."""
    if found:
        raise RuntimeError(what)


def on_host(t: Tensor) -> Tensor:
    return torch.ops.emulated.host(t)


def on_device(t: Tensor, like: Tensor) -> Tensor:
    return torch.ops.emulated.adopt(t, like.device.index or 0)


def check(q: Tensor, k: Tensor, v: Tensor, half_only: bool) -> None:
    """What both kinds of kernels ask of queries, keys and values, [B, H, M, d]."""
    for name, t in (("query", q), ("key", k), ("value", v)):
        refuse(t.device != q.device, f"{name} lies on {t.device}, query on {q.device}")
        refuse(t.dim() != 4, f"{name} has {t.dim()} dimensions, expected 4")
        refuse(t.dtype != q.dtype, f"{name} is {t.dtype}, query {q.dtype}")
        refuse(t.stride(-1) != 1, f"{name}: must have contiguous last dimension")
        aligned = 8 if t.dtype in HALF else 4
        for dim in (0, 1, 2):
            off = t.size(dim) > 1 and t.stride(dim) % aligned
            refuse(bool(off), f"{name} is not correctly aligned (stride {t.stride(dim)})")
        refuse(t.data_ptr() % 16 != 0, f"{name}_ptr is not correctly aligned")
        refuse(t.shape[-1] % aligned != 0, f"{name}: head width {t.shape[-1]} % {aligned}")
    refuse(q.dtype == torch.float64, "no kernel found to launch for float64")
    refuse(
        half_only and q.dtype not in HALF, "FlashAttention only supports fp16 and bf16 data type"
    )
    refuse(half_only and q.shape[-1] > 256, "FlashAttention supports head dimension at most 256")
    refuse(k.shape[2] != v.shape[2], "keys and values differ in number")


def softmax(q, k, v, bias, scale) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp in float32 from host tensors."""
    scores = (q.float() @ k.float().transpose(-1, -2)) * scale
    scores = scores if bias is None else scores + bias.float()
    lse = scores.logsumexp(-1)
    p = (scores - lse[..., None]).exp().nan_to_num(0.0)  # a row that sees nothing
    return p @ v.float(), lse


def gradients(grad_out, q, k, v, bias, delta, lse, scale) -> tuple[Tensor, Tensor, Tensor]:
    """From host tensors: `delta` [B, H, M] is rowsum(grad_out * out)."""
    q, k, v, grad_out = (x.float() for x in (q, k, v, grad_out))
    scores = (q @ k.transpose(-1, -2)) * scale
    scores = scores if bias is None else scores + bias.float()
    p = (scores - lse[..., None]).exp()
    ds = p * (grad_out @ v.transpose(-1, -2) - delta[..., None]) * scale
    return ds @ k, ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ grad_out


def expanded(k: Tensor, heads: int) -> Tensor:
    return k.repeat_interleave(heads // k.shape[1], 1) if k.shape[1] != heads else k


# --- flash ----------------------------------------------------------------------------------------


def flash(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None) -> Any:
    calls["flash"] += 1
    check(q, k, v, half_only=True)
    refuse(bool(dropout_p) or is_causal and q.shape[2] != k.shape[2], "not emulated")
    scale = scale or q.shape[-1] ** -0.5
    hq, hk, hv = map(on_host, (q, k, v))
    bias = None
    if is_causal:
        bias = torch.full((q.shape[2],) * 2, -math.inf).triu(1)
    out, lse = softmax(hq, expanded(hk, q.shape[1]), expanded(hv, q.shape[1]), bias, scale)
    # as at::empty_like of the transposed query, transposed back
    given = torch.empty_like(q.transpose(1, 2)).transpose(1, 2)
    given.copy_(on_device(out.to(q.dtype), q))
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    none = torch.empty(0, dtype=q.dtype, device=q.device)
    return given, on_device(lse, q), None, None, q.shape[2], k.shape[2], state, none, none


def flash_backward(
    grad_out, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, seed, offset,
    *, scale=None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    calls["flash backward"] += 1
    check(q, k, v, half_only=True)
    refuse(not lse.is_contiguous(), "softmax_lse must be contiguous")
    refuse(lse.dtype != torch.float32, "softmax_lse must be float32")
    refuse((max_q, max_k) != (q.shape[2], k.shape[2]), "max_seqlen is not the length")
    scale = scale or q.shape[-1] ** -0.5
    host = [on_host(x) for x in (grad_out, q, k, v, out)]  # out and grad_out are made contiguous
    delta = (host[0].float() * host[4].float()).sum(-1)
    keys, values = (expanded(x, q.shape[1]) for x in host[2:4])
    bias = torch.full((q.shape[2],) * 2, -math.inf).triu(1) if is_causal else None
    dq, dk, dv = gradients(host[0], host[1], keys, values, bias, delta, on_host(lse), scale)
    groups = (k.shape[0], k.shape[1], -1, k.shape[2], k.shape[3])
    dk, dv = (x.view(groups).sum(2) for x in (dk, dv))
    found = []
    for like, grad in ((q, dq), (k, dk), (v, dv)):
        made = torch.empty_like(like.transpose(1, 2)).transpose(1, 2)
        found.append(made.copy_(on_device(grad.to(like.dtype), like)))
    return tuple(found)


# --- efficient ------------------------------------------------------------------------------------


def check_bias(bias: Tensor | None, q: Tensor, k: Tensor) -> None:
    if bias is None:
        return
    refuse(bias.device != q.device, f"attn_bias lies on {bias.device}, query on {q.device}")
    refuse(bias.dtype != q.dtype, "invalid dtype for bias - should match query's dtype")
    wanted = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    refuse(tuple(bias.shape) != wanted, f"attn_bias: wrong shape {tuple(bias.shape)}, {wanted}")
    refuse(bias.stride(3) != 1, "attn_bias: wrong alignment (last dimension must be contiguous)")
    aligned = 8 if q.dtype in HALF else 4
    for dim in (0, 1, 2):
        off = bias.size(dim) > 1 and bias.stride(dim) % aligned
        refuse(bool(off), f"attn_bias is not correctly aligned (stride {bias.stride(dim)})")
    refuse(bias.data_ptr() % 16 != 0, "attn_bias_ptr is not correctly aligned")


def efficient(
    q, k, v, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    calls["efficient"] += 1
    check(q, k, v, half_only=False)
    refuse(q.shape[1] != k.shape[1], "efficient attention takes no grouped heads")
    check_bias(attn_bias, q, k)
    refuse(bool(dropout_p) or is_causal and q.shape[2] != k.shape[2], "not emulated")
    scale = scale or q.shape[-1] ** -0.5
    bias = None if attn_bias is None else on_host(attn_bias)
    if is_causal:
        bias = torch.full((q.shape[2],) * 2, -math.inf).triu(1) + (0 if bias is None else bias)
    out, lse = softmax(*map(on_host, (q, k, v)), bias, scale)
    batch, heads, rows, width = q.shape
    made = out.to(q.dtype).transpose(1, 2).contiguous()  # [B, M, H, d]
    kept = torch.full((batch, heads, -rows % LSE_ROWS + rows), math.inf)
    kept[..., :rows] = lse
    kept = kept if compute_log_sumexp else kept[..., :0]
    numbers = [torch.empty((), dtype=torch.int64) for _ in "so"]  # on the host, without dropout
    return on_device(made, q).transpose(1, 2), on_device(kept, q), *numbers


def efficient_backward(
    grad_out, q, k, v, attn_bias, out, lse, seed, offset, dropout_p, grad_input_mask,
    is_causal=False, *, scale=None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    calls["efficient backward"] += 1
    check(q, k, v, half_only=False)
    bias = attn_bias if attn_bias is not None and attn_bias.numel() else None
    check_bias(bias, q, k)
    batch, heads, rows, width = q.shape
    refuse(out.data_ptr() % 16 != 0, "output_ptr is not correctly aligned")
    refuse(heads > 1 and lse.stride(1) % 8 != 0, "LSE is not correctly aligned (strideH)")
    refuse(batch > 1 and lse.stride(0) % 8 != 0, "LSE is not correctly aligned (strideB)")
    refuse(lse.dtype != torch.float32, "LSE must be float32")
    scale = scale or width**-0.5

    padded = -rows % LSE_ROWS + rows
    lse_BHP = as_read(lse, (batch, heads, padded), (lse.stride(0), lse.stride(1), 1))
    beyond = lse_BHP[..., rows:]
    refuse(
        bool((beyond != math.inf).any()),
        "the log-sum-exp of rows beyond the last one must be inf: the kernel reads them",
    )
    grad_BHMd = on_host(grad_out)  # made contiguous
    if q.dtype in HALF:
        # The kernel computes delta, and is told no row stride of `out`: o_strideM() = d * heads.
        out_t = out.transpose(1, 2)
        strides = (out_t.stride(0), out_t.stride(2), width * heads, 1)
        read = as_read(out, (batch, heads, rows, width), strides)
    else:  # computed by other operators
        read = on_host(out)
    delta = (grad_BHMd.float() * read.float()).sum(-1)
    hb = None if bias is None else on_host(bias)
    if is_causal:
        hb = torch.full((rows,) * 2, -math.inf).triu(1) + (0 if hb is None else hb)
    grads = gradients(grad_BHMd, *map(on_host, (q, k, v)), hb, delta, lse_BHP[..., :rows], scale)
    found = [
        on_device(g.to(q.dtype).transpose(1, 2).contiguous(), q).transpose(1, 2) for g in grads
    ]
    return *found, None


def as_read(t: Tensor, size: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """What a kernel finds that reads from a tensor's first number on with these strides, whatever its
    own are; NaN beyond the end of its memory."""
    room = t.untyped_storage().nbytes() // t.element_size() - t.storage_offset()
    flat = on_host(torch.as_strided(t, (room,), (1,), t.storage_offset()))
    index = sum(
        torch.arange(n).view([-1 if i == j else 1 for j in range(len(size))]) * s
        for i, (n, s) in enumerate(zip(size, strides, strict=True))
    )
    values = flat[index.clamp_max(room - 1)]
    return values.masked_fill(index >= room, math.nan)


# --- cuDNN and the choice -------------------------------------------------------------------------


def cudnn(
    q, k, v, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False,
    return_debug_mask=False, *, scale=None,
) -> Any:  # fmt: skip
    calls["cudnn"] += 1
    # MHA.cpp: a plan for every geometry, kept for ever, a map for each thread
    about = [x for t in (q, k, v) for x in (tuple(t.shape), t.stride())]
    if attn_bias is not None:
        about += [tuple(attn_bias.shape), attn_bias.stride()]
    plans.add((*about, q.dtype, is_causal))
    scale = scale or q.shape[-1] ** -0.5
    bias = None if attn_bias is None else on_host(attn_bias)
    keys, values = (expanded(on_host(x), q.shape[1]) for x in (k, v))
    if is_causal:
        bias = torch.full((q.shape[2], k.shape[2]), -math.inf).triu(1 + k.shape[2] - q.shape[2])
    out, lse = softmax(on_host(q), keys, values, bias, scale)
    given = on_device(out.to(q.dtype).transpose(1, 2).contiguous(), q).transpose(1, 2)
    number = torch.zeros((), dtype=torch.int64, device=q.device)
    none = torch.empty(0, dtype=q.dtype, device=q.device)
    stats = on_device(lse[..., None], q)
    return given, stats, None, None, q.shape[2], k.shape[2], number, number, none


def choice(
    q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False
) -> int:
    """As sdp_utils.cpp on an H100: cuDNN first unless told otherwise, then flash, efficient, math."""
    global _prefer_cudnn
    if _prefer_cudnn is None:
        _prefer_cudnn = os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1"
    half, width = q.dtype in HALF, q.shape[-1]
    last = all(t.stride(-1) == 1 for t in (q, k, v))
    same_width = width == k.shape[-1] == v.shape[-1]
    same_heads = q.shape[1] == k.shape[1] == v.shape[1]
    heads = same_heads or enable_gqa
    nonzero = q.shape[2] > 0 and k.shape[2] > 0
    cudnn_can = half and last and heads and nonzero and width <= 256 and k.shape[2] > 1
    cudnn_can = cudnn_can and width % 8 == 0 and torch.backends.cuda.cudnn_sdp_enabled()
    flash_can = half and last and heads and nonzero and same_width and width <= 256
    flash_can = flash_can and attn_mask is None and torch.backends.cuda.flash_sdp_enabled()
    flash_can = flash_can and (not is_causal or q.shape[2] == k.shape[2])
    aligned = 8 if half else 4
    efficient_can = (half or q.dtype == torch.float32) and last and same_heads and nonzero
    efficient_can = efficient_can and width == k.shape[-1] and not width % aligned
    efficient_can = efficient_can and torch.backends.cuda.mem_efficient_sdp_enabled()
    if cudnn_can and _prefer_cudnn:
        return CUDNN
    if flash_can:
        return FLASH
    if efficient_can:
        return EFFICIENT
    return CUDNN if cudnn_can else MATH


def register() -> torch.library.Library:
    """Make these the kernels of the device; they are as long as the library returned."""
    library = torch.library.Library("aten", "IMPL", "CUDA")
    for name, kernel in {
        "_scaled_dot_product_flash_attention": flash,
        "_scaled_dot_product_flash_attention_backward": flash_backward,
        "_scaled_dot_product_efficient_attention": efficient,
        "_scaled_dot_product_efficient_attention_backward": efficient_backward,
        "_scaled_dot_product_cudnn_attention": cudnn,
        "_fused_sdp_choice": choice,
    }.items():
        library.impl(name, kernel)
    return library
