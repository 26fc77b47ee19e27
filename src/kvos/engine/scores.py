"""Attention over keys and values that are at hand: PyTorch's fused kernel, or plain steps for what that lacks."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["additive", "attend"]


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax-weighted values ``[batch, heads, rows, v_dim]``.

    Args:
        queries: ``[batch, heads, rows, k_dim]``; query heads that share a KV head are neighbours.
        keys: ``[batch, kv_heads, context, k_dim]``; values likewise with ``v_dim``.
        scale: of the scores.
        mask: added to the scores, broadcast to ``[batch, 1, rows, context]``.
        causal: row ``i`` sees keys up to ``i``; instead of a mask.
        softcap: scores go through ``softcap * tanh(scores / softcap)`` before the mask (Gemma 2).
        sinks: ``[heads]``, a score per head that takes part in the softmax and has no value (GPT-OSS).
    """
    if softcap is None and sinks is None:
        return scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=True
        )
    grouped = queries.unflatten(1, (keys.shape[1], -1))
    scores = (grouped @ keys[:, :, None].transpose(-1, -2)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    wide = scores if scores.dtype == torch.float64 else scores.float()
    if causal:
        ahead = torch.ones(wide.shape[-2:], dtype=torch.bool, device=wide.device).triu(1)
        wide = wide + additive(ahead, wide.dtype)
    elif mask is not None:
        wide = wide + mask[:, :, None]
    if sinks is None:
        weights = wide.softmax(-1)
    else:
        column = sinks.to(wide.dtype).view(1, keys.shape[1], -1, 1, 1).expand(*wide.shape[:-1], 1)
        weights = torch.cat([wide, column], dim=-1).softmax(-1)[..., :-1]
    weighted: torch.Tensor = weights.to(values.dtype) @ values[:, :, None]
    return weighted.flatten(1, 2)


def additive(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask to add to scores: minus infinity where ``hidden``, else zero."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
