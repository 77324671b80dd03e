"""Accept length of the MTP layer under greedy chain speculation."""

from __future__ import annotations

from collections import Counter

import torch
import torch.nn.functional as F
from decode import continue_greedily
from model import Pebble, mla_output, mla_qkv, rms_norm
from torch import Tensor

DEPTHS = 8


def loops(ids: list[int], n: int = 8, times: int = 3) -> bool:
    """Whether some n-gram occurs at least so many times."""
    grams = Counter(tuple(ids[i : i + n]) for i in range(len(ids) - n + 1))
    return bool(grams) and max(grams.values()) >= times


@torch.no_grad()
def draft_ids(model: Pebble, ids: Tensor, depths: int = DEPTHS) -> Tensor:
    """Drafts of every chain along given sequences: [B, depths, T-1]; entry (j, t) guesses id[t+2].

    Exact for counting accepted drafts: a chain is only followed while its drafts equal the text.
    """
    h = model(ids)[:, :-1]
    cos, sin = model.tables(h.shape[1], h.device)
    steps = model.mtp.unroll(model.embed(ids[:, 1:]), h, cos, sin, depths)
    return torch.stack([F.linear(m, model.lm_head).argmax(-1) for m in steps], 1)


def accepted(ids: list[int], prompt: int, new: int, drafts: list[list[int]], chain: int) -> list[int]:
    """Tokens committed by each round (accepted drafts and the bonus token) of one sequence."""
    out, k = [], prompt
    while k + 1 < prompt + new and k + 1 < len(ids):
        n = 0
        while n < chain and k + n + 1 < len(ids) and drafts[n][k + n - 1] == ids[k + n + 1]:
            n += 1
        n = min(n, len(ids) - k - 2)
        out.append(n + 1)
        k += n + 1
    return out


@torch.no_grad()
def measure(model: Pebble, prompts: list[list[int]], new: int, stop: set[int]) -> dict:
    """Accept lengths at chains of 1..8, over prompts whose continuation does not loop."""
    rows = continue_greedily(model, prompts, new + DEPTHS, stop)
    kept = [i for i, row in enumerate(rows) if not loops(row[:new])]
    kept = [i for i in kept if len(rows[i]) > 1]
    sequences = [prompts[i] + rows[i] for i in kept]
    counts: dict[int, list[list[int]]] = {s: [] for s in range(1, DEPTHS + 1)}
    for start in range(0, len(kept), 32):
        part = sequences[start : start + 32]
        width = max(map(len, part))
        ids = torch.tensor([s + [0] * (width - len(s)) for s in part], device=model.norm.device)
        drafts = draft_ids(model, ids).tolist()
        for i, s, d in zip(kept[start : start + 32], part, drafts, strict=True):
            for chain in counts:
                counts[chain].append(accepted(s, len(prompts[i]), new, d, chain))
    pooled = {s: sum(map(sum, c)) / max(sum(map(len, c)), 1) for s, c in counts.items()}
    per_prompt = {s: sum(sum(r) / len(r) for r in c) / max(len(c), 1) for s, c in counts.items()}
    return {
        "prompts": len(prompts),
        "looping": sum(loops(row[:new]) for row in rows),
        "measured": len(kept),
        "accept_length": {s: round(v, 4) for s, v in pooled.items()},
        "accept_length_mean_over_prompts": {s: round(v, 4) for s, v in per_prompt.items()},
        "continuations": rows,
    }


@torch.no_grad()
def draft_slowly(model: Pebble, ids: Tensor, chain: int) -> list[int]:
    """One chain after a committed sequence [1,T] whose last token is not yet run, entry by entry as serving does."""
    c, mtp = model.c, model.mtp
    p = dict(mtp.block.attention.items())
    t = ids.shape[1] - 1
    cos, sin = model.tables(t + chain, ids.device)
    h = model(ids[:, :-1])
    keys = values = None
    drafts: list[int] = []
    embedded, row = model.embed(ids[:, 1:]), 0
    for _ in range(chain):
        n = h.shape[1]
        u = mtp.combine(embedded, h)
        x = rms_norm(u, mtp.block.input_layernorm)
        q, k, v, gate = mla_qkv(x, p, cos[row : row + n], sin[row : row + n], c)
        keys, values = (k, v) if keys is None else (torch.cat([keys, k], 2), torch.cat([values, v], 2))
        scale = (c.nope + c.rope) ** -0.5
        prob = (q[:, :, -1:] @ keys.mT * scale).softmax(-1)
        u = u[:, -1:] + mla_output(prob @ values, gate[:, -1:], p["dense"])
        u = u + mtp.block.mix(rms_norm(u, mtp.block.post_attention_layernorm))
        h = rms_norm(u, mtp.final_layernorm)
        drafts.append(int(F.linear(h[:, -1], model.lm_head).argmax()))
        embedded, row = model.embed(torch.tensor([[drafts[-1]]], device=ids.device)), row + n
    return drafts
