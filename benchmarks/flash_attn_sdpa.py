"""The two functions of ``flash_attn`` that nano-vllm calls, made of torch's own attention.

    sys.modules["flash_attn"] = flash_attn_sdpa

The decode can be captured: it gathers by the whole block table and masks what is beyond each length, so its shapes
depend on nothing but the shapes of its arguments, and no value is read on the host.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

Tensor = torch.Tensor


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor, block_table: Tensor, softmax_scale: float,
    **_: Any,
) -> Tensor:  # fmt: skip
    """One token per row: q ``[batch, 1, heads, dim]``, caches ``[blocks, block size, kv heads, dim]`` -> like q."""
    keys, values = gathered(k_cache, block_table), gathered(v_cache, block_table)
    position = torch.arange(keys.size(1), device=q.device)
    # A row of padding has no key at all: with the first one it gets numbers that nobody reads, and not NaN.
    mask = (position < cache_seqlens[:, None]) | (position == 0)
    return attention(q, keys, values, mask[:, None, None, :], softmax_scale)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, softmax_scale: float,
    block_table: Tensor | None, **_: Any,
) -> Tensor:  # fmt: skip
    """Prompts one after another: q ``[tokens, heads, dim]``; keys likewise, or in blocks where some were cached."""
    sequence, position = places(q.size(0), cu_seqlens_q)
    lengths = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
    position = position + (lengths - (cu_seqlens_q[1:] - cu_seqlens_q[:-1]))[sequence]
    if block_table is None:
        of, at = places(k.size(0), cu_seqlens_k)
    else:
        k, v = gathered(k, block_table), gathered(v, block_table)
        of, at = (torch.cartesian_prod(*(torch.arange(n, device=q.device) for n in k.shape[:2]))).unbind(1)
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    mask = (sequence[:, None] == of) & (at <= position[:, None]) & (at < lengths[of])
    return attention(q[None], k[None], v[None], mask, softmax_scale)[0]


def places(tokens: int, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Which sequence each token belongs to, and where in it it is."""
    index = torch.arange(tokens, device=starts.device)
    sequence = torch.searchsorted(starts, index, right=True) - 1
    return sequence, index - starts[sequence]


def gathered(cache: Tensor, table: Tensor) -> Tensor:
    """``[batch, blocks x block size, kv heads, dim]``; what is no block is the first one, and masked."""
    return cache[table.clamp(min=0)].flatten(1, 2)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """``[batch, tokens, heads, dim]``, each."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)
