"""Batched token-by-token decoding of the trainable model: for generated training texts and for measuring."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from model import LOWER_BOUND, Block, Pebble, ffn, kda_output, l2_norm, mla_output, mla_qkv, moe, rms_norm
from torch import Tensor


class Decoder:
    """Token-by-token decoding of a batch: recurrent states, convolution windows and key/value rows."""

    def __init__(self, model: Pebble, batch: int, length: int):
        self.model, self.pos, c = model, 0, model.c
        device = model.norm.device
        dtype = model.embed(torch.zeros(1, dtype=torch.long, device=device)).dtype
        p = c.heads * c.head_dim
        self.cos, self.sin = model.tables(length, device)
        self.state: list[tuple[Tensor, Tensor]] = []
        for block in model.blocks:
            if block.is_mla:
                k = torch.zeros(batch, c.heads, length, c.nope + c.rope, device=device, dtype=dtype)
                v = torch.zeros(batch, c.heads, length, c.v_dim, device=device, dtype=dtype)
                self.state.append((k, v))
            else:
                s = torch.zeros(batch, c.heads, c.head_dim, c.head_dim, device=device)
                self.state.append((s, torch.zeros(batch, 3, 3 * p, device=device, dtype=dtype)))

    def _kda(self, block: Block, x: Tensor, state: tuple[Tensor, Tensor]) -> Tensor:
        c, p = block.c, block.attention
        s, window = state
        b = x.shape[0]
        qkv = torch.cat([F.linear(x, p[f"{n}_proj"]) for n in "qkv"], -1)
        rows = torch.cat([window.to(qkv.dtype), qkv], 1)
        window.copy_(rows[:, 1:])
        conv = torch.cat([p[f"{n}_conv1d"] for n in "qkv"])
        y = F.silu((rows * conv.T.to(rows.dtype)).sum(1))
        q, k, v = y.view(b, 3, c.heads, c.head_dim).unbind(1)
        q, k, v = l2_norm(q) * c.head_dim**-0.5, l2_norm(k), v.float()
        f = (F.linear(x, p["f_proj"])[:, 0].float() + p["dt_bias"]).view(b, c.heads, -1)
        g = LOWER_BOUND * torch.sigmoid(p["A_log"].exp()[:, None] * f)
        beta = torch.sigmoid(F.linear(x, p["b_proj"])[:, 0].float())
        s.mul_(g.exp()[..., None])
        with torch.autocast(x.device.type, enabled=False):
            e = (v - (k[..., None, :] @ s)[..., 0, :]) * beta[..., None]
            s.add_(k[..., None] * e[..., None, :])
            o = (q[..., None, :] @ s)[..., 0, :]
        return kda_output(o[:, None].to(x.dtype), F.linear(x, p["g_proj"]), p["o_norm"], p["o_proj"])

    def _mla(self, block: Block, x: Tensor, state: tuple[Tensor, Tensor]) -> Tensor:
        c, (keys, values), t = block.c, state, self.pos
        q, k, v, gate = mla_qkv(x, dict(block.attention.items()), self.cos[t : t + 1], self.sin[t : t + 1], c)
        keys[:, :, t], values[:, :, t] = k[:, :, 0].to(keys.dtype), v[:, :, 0].to(values.dtype)
        scale = (c.nope + c.rope) ** -0.5
        prob = (q.to(keys.dtype) @ keys[:, :, : t + 1].mT * scale).float().softmax(-1).to(values.dtype)
        return mla_output(prob @ values[:, :, : t + 1], gate, block.attention["dense"])

    @torch.no_grad()
    def step(self, ids: Tensor) -> Tensor:
        """Feed one token a sequence ([B]); logits of the next one ([B, vocab])."""
        m = self.model
        h = m.embed(ids[:, None])
        for block, state in zip(m.blocks, self.state, strict=True):
            x = rms_norm(h, block.input_layernorm)
            h = h + (self._mla if block.is_mla else self._kda)(block, x, state)
            x = rms_norm(h, block.post_attention_layernorm)
            h = h + (
                ffn(x, dict(block.mlp.items()))
                if block.is_dense
                else moe(x, dict(block.mlp.items()), block.expert_bias, block.c)[0]
            )
        self.pos += 1
        return F.linear(rms_norm(h[:, 0], m.norm), m.lm_head).float()


@torch.no_grad()
def continue_greedily(
    model: Pebble, prompts: list[list[int]], new: int, stop: set[int], temperature: float = 0.0
) -> list[list[int]]:
    """Continuations of prompts of any lengths, decoded side by side; a stop id ends its sequence."""
    device = model.norm.device
    lengths = [len(p) for p in prompts]
    total = max(lengths) + new
    ids = torch.zeros(len(prompts), total + 1, dtype=torch.long, device=device)
    for i, prompt in enumerate(prompts):
        ids[i, : len(prompt)] = torch.tensor(prompt, device=device)
    length = torch.tensor(lengths, device=device)
    decoder = Decoder(model, len(prompts), total)
    for t in range(total - 1):
        logits = decoder.step(ids[:, t])
        if temperature > 0:
            logits = logits - temperature * torch.log(-torch.log(torch.rand_like(logits)))
        ids[:, t + 1] = torch.where(length > t + 1, ids[:, t + 1], logits.argmax(-1))
    rows = [row[n : n + new] for row, n in zip(ids.tolist(), lengths, strict=True)]
    ends = [next((i + 1 for i, token in enumerate(row) if token in stop), new) for row in rows]
    return [row[:end] for row, end in zip(rows, ends, strict=True)]
