"""A Llama in pure torch whose decode step a CUDA graph can hold.

One forward serves prefill and decode. It reads nothing from the host: which row belongs to which slot of the cache
is a tensor, attention always spans ``max_len`` positions, and a mask made from the positions hides the rest.
Parameter names are those of the published checkpoints, so real weights go in through ``load_state_dict``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """The sizes of a Llama; the defaults are the tiny demo model."""

    vocab: int = 256
    hidden: int = 64
    intermediate: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    eps: float = 1e-5
    theta: float = 10000.0


class KVCache:
    """Keys and values of all requests, a slot each; the slot behind the last one is scratch for pad rows.

    ``keys[layer]`` and ``values[layer]`` are ``[slots + 1, kv_heads, max_len, head_dim]`` and never move.
    """

    def __init__(self, shape: LlamaShape, slots: int, max_len: int, like: Tensor) -> None:
        size = (shape.layers, slots + 1, shape.kv_heads, max_len, shape.head_dim)
        self.keys, self.values = like.new_zeros(size), like.new_zeros(size)
        self.scratch, self.max_len = slots, max_len

    def clear(self) -> None:
        """Forget every request; the memory stays where it is."""
        self.keys.zero_()
        self.values.zero_()

    def write(self, layer: int, slots: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store ``[rows, steps, kv_heads, head_dim]`` at ``slots [rows]`` and ``positions [rows, steps]``."""
        index = (slots[:, None], slice(None), positions)
        self.keys[layer][index] = keys
        self.values[layer][index] = values

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values ``[rows, kv_heads, max_len, head_dim]`` of ``slots [rows]``."""
        return self.keys[layer].index_select(0, slots), self.values[layer].index_select(0, slots)


@dataclass(slots=True)
class Step:
    """What the layers of one forward share: where each row is, and what it may look at."""

    cache: KVCache
    slots: Tensor  # [rows]
    positions: Tensor  # [rows, steps]
    cos: Tensor  # [rows, steps, 1, head_dim]
    sin: Tensor
    mask: Tensor  # [rows, 1, steps * group, max_len], group = heads / kv_heads


class Attention(nn.Module):
    """Grouped-query attention over a slot of the cache."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)

    def forward(self, x: Tensor, layer: int, step: Step) -> Tensor:
        """``[rows, steps, hidden]`` in and out; writes the rows' keys and values first."""
        rows, steps, kv_heads, dim = *step.positions.shape, self.shape.kv_heads, self.shape.head_dim
        query = rotate(self.q_proj(x).view(rows, steps, -1, dim), step)
        key = rotate(self.k_proj(x).view(rows, steps, kv_heads, dim), step)
        step.cache.write(layer, step.slots, step.positions, key, self.v_proj(x).view(rows, steps, kv_heads, dim))
        keys, values = step.cache.read(layer, step.slots)
        # The queries that share a key head become extra query rows, so keys are not repeated.
        query = query.view(rows, steps, kv_heads, -1, dim).transpose(1, 2).reshape(rows, kv_heads, -1, dim)
        mixed = functional.scaled_dot_product_attention(query, keys, values, attn_mask=step.mask)
        mixed = mixed.reshape(rows, kv_heads, steps, -1).transpose(1, 2)
        return cast(Tensor, self.o_proj(mixed.reshape(rows, steps, -1)))


class MLP(nn.Module):
    """The gated feed-forward block."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[rows, steps, hidden]`` in and out."""
        return cast(Tensor, self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x)))


class Layer(nn.Module):
    """One transformer layer."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, shape.eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, shape.eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, layer: int, step: Step) -> Tensor:
        """``[rows, steps, hidden]`` in and out."""
        x = x + self.self_attn(self.input_layernorm(x), layer, step)
        return x + cast(Tensor, self.mlp(self.post_attention_layernorm(x)))


class Body(nn.Module):
    """The layers between token ids and the head, named as the checkpoints name them."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, shape.eps)

    def forward(self, input_ids: Tensor, step: Step) -> Tensor:
        """``[rows, steps]`` ids to ``[rows, steps, hidden]``."""
        x = self.embed_tokens(input_ids)
        for number, layer in enumerate(self.layers):
            x = layer(x, number, step)
        return cast(Tensor, self.norm(x))


class Llama(nn.Module):
    """The model with its cache; greedy, and without autograd."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Body(shape)
        self.lm_head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        self.cache: KVCache | None = None

    def allocate(self, slots: int, max_len: int) -> KVCache:
        """Make the cache and the rotary tables ``[max_len, head_dim]``, where the weights are; returns the cache."""
        weight = self.lm_head.weight.detach()
        frequencies = torch.arange(0, self.shape.head_dim, 2, device=weight.device) / self.shape.head_dim
        angles = torch.arange(max_len, device=weight.device)[:, None] / self.shape.theta**frequencies
        angles = torch.cat((angles, angles), dim=-1)
        self.cos, self.sin = angles.cos().to(weight.dtype), angles.sin().to(weight.dtype)
        self.cache = KVCache(self.shape, slots, max_len, weight)
        return self.cache

    @torch.no_grad()
    def forward(self, input_ids: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        """The next token ``[rows]`` behind the last of ``input_ids [rows, steps]``; fills the cache on the way."""
        hidden = self.model(input_ids, self._step(positions, slots))
        return cast(Tensor, self.lm_head(hidden[:, -1]).argmax(dim=-1))

    def _step(self, positions: Tensor, slots: Tensor) -> Step:
        assert self.cache is not None, "allocate() first"
        group = self.shape.heads // self.shape.kv_heads
        seen = torch.arange(self.cache.max_len, device=positions.device) <= positions[:, :, None, None]
        mask = seen.expand(-1, -1, group, -1).flatten(1, 2)[:, None]
        return Step(
            self.cache, slots, positions, self.cos[positions][:, :, None], self.sin[positions][:, :, None], mask
        )


def rotate(x: Tensor, step: Step) -> Tensor:
    """Rotary position embedding of ``x [rows, steps, heads, head_dim]``."""
    left, right = x.chunk(2, dim=-1)
    return x * step.cos + torch.cat((-right, left), dim=-1) * step.sin
