"""pebble's trainable model: a small Ling-3 (BailingMoeV3) decoder in plain torch.

Parameter names follow the published checkpoint names, except that the routed
experts of a layer are stacked into three tensors (``export.py`` unstacks them).

Shapes in comments: B sequences, T tokens, D hidden, N heads, K head width, E experts.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPS = 1e-6
LOWER_BOUND = -5.0


@dataclass(frozen=True)
class Config:
    """Sizes of pebble. The defaults are the shipped model."""

    vocab: int = 4096
    hidden: int = 256
    layers: int = 6
    group: int = 3
    heads: int = 2
    head_dim: int = 128
    kv_lora: int = 512
    rope: int = 64
    nope: int = 128
    v_dim: int = 128
    dense: int = 512
    experts: int = 16
    expert_dim: int = 32
    groups: int = 4
    kept_groups: int = 2
    top_k: int = 4
    shared: int = 128
    scale: float = 2.5
    rope_theta: float = 6e6
    first_dense: int = 1

    def is_mla(self, layer: int) -> bool:
        """Whether a layer is full attention; the MTP layer (index ``layers``) always is."""
        return layer >= self.layers or (layer + 1) % self.group == 0

    def asdict(self) -> dict:
        """The sizes as a plain dictionary."""
        return asdict(self)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Root-mean-square norm in float32, returned in the input's dtype."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS)
    return (y * weight.float()).to(x.dtype)


def short_conv(u: Tensor, weight: Tensor) -> Tensor:
    """Causal depthwise convolution of four taps, then SiLU. u: [B,T,C], weight: [C,4]."""
    w = weight.to(u.dtype)
    y = u * w[:, 3]
    for lag in (1, 2, 3):
        y = y + F.pad(u, (0, 0, lag, 0))[:, : u.shape[1]] * w[:, 3 - lag]
    return F.silu(y)


def l2_norm(x: Tensor) -> Tensor:
    """Unit length over the last axis, with the small constant inside the root."""
    y = x.float()
    return y * torch.rsqrt(y.pow(2).sum(-1, keepdim=True) + EPS)


def kda_chunk(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int = 16) -> Tensor:
    """Chunked gated delta rule in float32, any device. q, k, v, g: [B,T,N,K]; beta: [B,T,N].

    Chunks of 16 keep exp(-cumulative g) below e**80, so that the factored products stay finite.
    """
    b, t, n, d = q.shape
    pad = -t % chunk
    if pad:
        q, k, v, g = (F.pad(x, (0, 0, 0, 0, 0, pad)) for x in (q, k, v, g))
        beta = F.pad(beta, (0, 0, 0, pad))
    m = (t + pad) // chunk
    q, k, v, g = (x.float().view(b, m, chunk, n, d).permute(1, 0, 3, 2, 4) for x in (q, k, v, g))
    beta = beta.float().view(b, m, chunk, n).permute(1, 0, 3, 2)[..., None]
    g = g.cumsum(-2)
    q_in = q * g.exp() * d**-0.5
    k_in, k_out = k * g.exp(), k * (-g).exp()
    strict = torch.tril(torch.ones(chunk, chunk, device=q.device), -1)
    lower = strict + torch.eye(chunk, device=q.device)
    solve = torch.eye(chunk, device=q.device) + beta * (k_in @ k_out.mT) * strict
    attn = (q_in @ k_out.mT) * lower
    last = g[..., -1:, :].exp()
    k_last = k * (g[..., -1:, :] - g).exp()
    rhs_v, rhs_k = beta * v, beta * k_in
    both = torch.linalg.solve_triangular(solve, torch.cat([rhs_v, rhs_k], -1), upper=False, unitriangular=True)
    u, w = both[..., :d], both[..., d:]
    state = q.new_zeros(b, n, d, d)
    out = []
    for i in range(m):
        new = u[i] - w[i] @ state
        out.append(q_in[i] @ state + attn[i] @ new)
        state = state * last[i].mT + k_last[i].mT @ new
    return torch.stack(out, 1).permute(0, 1, 3, 2, 4).reshape(b, m * chunk, n, d)[:, :t]


@torch.compiler.disable
def kda_fused(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The same recurrence through fla's kernels (CUDA only). g is the log decay."""
    from fla.ops.kda import chunk_kda

    return chunk_kda(q=q, k=k, v=v, g=g, beta=beta, safe_gate=True, lower_bound=LOWER_BOUND)[0]


def kda_inputs(x: Tensor, weight: Tensor, conv: Tensor, a_log: Tensor, dt_bias: Tensor, heads: int) -> tuple:
    """Projections, convolutions, norms and gates before the recurrence."""
    b, t, _ = x.shape
    p = conv.shape[0] // 3
    z = F.linear(x, weight)
    qkv, f, gate, beta = z.split([3 * p, p, p, heads], -1)
    q, k, v = short_conv(qkv, conv).view(b, t, 3, heads, -1).unbind(2)
    q, k = l2_norm(q).to(x.dtype), l2_norm(k).to(x.dtype)
    f = (f.float() + dt_bias).view(b, t, heads, -1)
    g = LOWER_BOUND * torch.sigmoid(a_log.exp()[:, None] * f)
    return q.contiguous(), k.contiguous(), v.contiguous(), g, torch.sigmoid(beta.float()), gate


def kda_output(o: Tensor, gate: Tensor, norm: Tensor, weight: Tensor) -> Tensor:
    """Gated norm per head, then the output projection."""
    o = rms_norm(o.float(), norm) * torch.sigmoid(gate.float().view(o.shape))
    return F.linear(o.to(gate.dtype).flatten(2), weight)


def rope_table(positions: Tensor, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines, [T, dim/2], float32."""
    inv = theta ** (-torch.arange(0, dim, 2, device=positions.device, dtype=torch.float64) / dim)
    angle = positions.double()[:, None] * inv
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotation of adjacent pairs in place. x: [..., T, dim]."""
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2).to(x.dtype)


def mla_qkv(x: Tensor, p: dict[str, Tensor], cos: Tensor, sin: Tensor, c: Config) -> tuple:
    """Queries, keys, values ([B,N,T,*]) and the head gates ([B,T,N])."""
    b, t, _ = x.shape
    z = F.linear(x, torch.cat([p["q_proj"], p["kv_a_proj_with_mqa"], p["g_proj"]]))
    q, latent, k_rot, gate = z.split([c.heads * (c.nope + c.rope), c.kv_lora, c.rope, c.heads], -1)
    q = q.view(b, t, c.heads, -1).transpose(1, 2)
    q = torch.cat([q[..., : c.nope], rotate(q[..., c.nope :], cos, sin)], -1)
    kv = F.linear(rms_norm(latent, p["kv_a_layernorm"]), p["kv_b_proj"])
    kv = kv.view(b, t, c.heads, -1).transpose(1, 2)
    k_rot = rotate(k_rot, cos, sin)[:, None].expand(-1, c.heads, -1, -1)
    k = torch.cat([kv[..., : c.nope], k_rot], -1)
    return q, k, kv[..., c.nope :], torch.sigmoid(gate.float())


def mla_output(o: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    """Head gates and output projection. o: [B,N,T,V]."""
    o = o.transpose(1, 2) * gate.to(o.dtype)[..., None]
    return F.linear(o.flatten(2), weight)


def mla(x: Tensor, p: dict[str, Tensor], cos: Tensor, sin: Tensor, c: Config) -> Tensor:
    """Causal latent attention over the whole sequence."""
    q, k, v, gate = mla_qkv(x, p, cos, sin, c)
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=(c.nope + c.rope) ** -0.5)
    return mla_output(o, gate, p["dense"])


def route(x: Tensor, weight: Tensor, bias: Tensor, c: Config) -> tuple[Tensor, Tensor]:
    """Weights of all experts (zero where not chosen) and the chosen mask, both [..., E]."""
    with torch.autocast(x.device.type, enabled=False):
        score = torch.sigmoid(F.linear(x.float(), weight.float()))
    with torch.no_grad():
        biased = score + bias.float()
        per_group = biased.unflatten(-1, (c.groups, -1))
        kept = per_group.topk(2, -1).values.sum(-1).topk(c.kept_groups, -1).indices
        keep = torch.zeros_like(per_group[..., 0], dtype=torch.bool).scatter(-1, kept, True)
        masked = per_group.masked_fill(~keep[..., None], -math.inf).flatten(-2)
        chosen = torch.zeros_like(masked, dtype=torch.bool).scatter(-1, masked.topk(c.top_k, -1).indices, True)
    w = score * chosen
    return w / (w.sum(-1, keepdim=True) + 1e-20) * c.scale, chosen


def moe(x: Tensor, p: dict[str, Tensor], bias: Tensor, c: Config) -> tuple[Tensor, Tensor]:
    """All experts at once, unchosen ones at weight zero, plus the shared expert."""
    w, chosen = route(x, p["gate"], bias, c)
    gate = torch.cat([p["experts_gate"].flatten(0, 1), p["shared_gate"]])
    up = torch.cat([p["experts_up"].flatten(0, 1), p["shared_up"]])
    down = torch.cat([p["experts_down"].transpose(0, 1).flatten(1), p["shared_down"]], 1)
    h = F.silu(F.linear(x, gate)) * F.linear(x, up)
    w = F.pad(w.to(h.dtype).repeat_interleave(c.expert_dim, -1), (0, c.shared), value=1.0)
    return F.linear(h * w, down), chosen.flatten(0, -2).float().mean(0)


def ffn(x: Tensor, p: dict[str, Tensor]) -> Tensor:
    """Dense SwiGLU."""
    return F.linear(F.silu(F.linear(x, p["gate_proj"])) * F.linear(x, p["up_proj"]), p["down_proj"])


def weight(*shape: int, std: float = 0.02) -> nn.Parameter:
    """A normal-initialised parameter."""
    return nn.Parameter(torch.randn(*shape) * std)


def ones(size: int) -> nn.Parameter:
    """A norm weight."""
    return nn.Parameter(torch.ones(size))


class Block(nn.Module):
    """One decoder layer; ``layer`` decides its attention and its MLP."""

    def __init__(self, c: Config, layer: int):
        super().__init__()
        self.c, self.is_mla, self.is_dense = c, c.is_mla(layer), layer < c.first_dense
        d, p = c.hidden, c.heads * c.head_dim
        std, out = d**-0.5, 0.02
        self.input_layernorm, self.post_attention_layernorm = ones(d), ones(d)
        if self.is_mla:
            self.attention = nn.ParameterDict(
                {
                    "q_proj": weight(c.heads * (c.nope + c.rope), d, std=std),
                    "kv_a_proj_with_mqa": weight(c.kv_lora + c.rope, d, std=std),
                    "kv_a_layernorm": ones(c.kv_lora),
                    "kv_b_proj": weight(c.heads * (c.nope + c.v_dim), c.kv_lora, std=c.kv_lora**-0.5),
                    "g_proj": weight(c.heads, d),
                    "dense": weight(d, c.heads * c.v_dim, std=out),
                }
            )
        else:
            self.attention = nn.ParameterDict(
                {f"{n}_proj": weight(p, d, std=std) for n in "qkvf"}
                | {f"{n}_conv1d": weight(p, 4, std=0.3) for n in "qkv"}
                | {
                    "g_proj": weight(p, d, std=std),
                    "b_proj": weight(c.heads, d),
                    "A_log": nn.Parameter(torch.zeros(c.heads)),
                    "dt_bias": nn.Parameter(torch.empty(p).uniform_(-7.0, -1.5)),
                    "o_norm": ones(c.head_dim),
                    "o_proj": weight(d, p, std=out),
                }
            )
        if self.is_dense:
            self.mlp = nn.ParameterDict(
                {
                    "gate_proj": weight(c.dense, d, std=std),
                    "up_proj": weight(c.dense, d, std=std),
                    "down_proj": weight(d, c.dense, std=out),
                }
            )
        else:
            self.mlp = nn.ParameterDict(
                {
                    "gate": weight(c.experts, d),
                    "experts_gate": weight(c.experts, c.expert_dim, d, std=std),
                    "experts_up": weight(c.experts, c.expert_dim, d, std=std),
                    "experts_down": weight(c.experts, d, c.expert_dim, std=out),
                    "shared_gate": weight(c.shared, d, std=std),
                    "shared_up": weight(c.shared, d, std=std),
                    "shared_down": weight(d, c.shared, std=out),
                }
            )
            self.expert_bias = nn.Buffer(torch.zeros(c.experts))
            self.load: Tensor | None = None

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attention of the normed input over the whole sequence."""
        p = self.attention
        if self.is_mla:
            return FUNCTIONS["mla"](x, dict(p.items()), cos, sin, self.c)
        w = torch.cat([p["q_proj"], p["k_proj"], p["v_proj"], p["f_proj"], p["g_proj"], p["b_proj"]])
        conv = torch.cat([p["q_conv1d"], p["k_conv1d"], p["v_conv1d"]])
        q, k, v, g, beta, gate = FUNCTIONS["kda_inputs"](x, w, conv, p["A_log"], p["dt_bias"], self.c.heads)
        run = kda_fused if x.is_cuda and q.dtype == torch.bfloat16 else kda_chunk
        return FUNCTIONS["kda_output"](run(q, k, v, g, beta), gate, p["o_norm"], p["o_proj"])

    def mix(self, x: Tensor) -> Tensor:
        """MLP of the normed input; remembers the experts' load."""
        if self.is_dense:
            return FUNCTIONS["ffn"](x, dict(self.mlp.items()))
        out, load = FUNCTIONS["moe"](x, dict(self.mlp.items()), self.expert_bias, self.c)
        self.load = load.detach()
        return out

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Residual stream through the layer."""
        h = h + self.attend(FUNCTIONS["rms_norm"](h, self.input_layernorm), cos, sin)
        return h + self.mix(FUNCTIONS["rms_norm"](h, self.post_attention_layernorm))


FUNCTIONS = {f.__name__: f for f in (rms_norm, kda_inputs, kda_output, mla, moe, ffn)}


def compile_functions() -> None:
    """Replace the layer functions by compiled ones; one graph serves all layers of a kind."""
    for name, function in list(FUNCTIONS.items()):
        FUNCTIONS[name] = torch.compile(function, dynamic=False)


class MTP(nn.Module):
    """The multi-token-prediction layer: entry t takes id[t+1] and the target's hidden state at t."""

    def __init__(self, c: Config):
        super().__init__()
        self.enorm, self.hnorm, self.final_layernorm = ones(c.hidden), ones(c.hidden), ones(c.hidden)
        self.eh_proj = weight(c.hidden, 2 * c.hidden, std=(2 * c.hidden) ** -0.5)
        self.block = Block(c, c.layers)

    def combine(self, embedded: Tensor, h: Tensor) -> Tensor:
        """The layer's input from the next token's embedding and a hidden state."""
        norm = FUNCTIONS["rms_norm"]
        return F.linear(torch.cat([norm(embedded, self.enorm), norm(h, self.hnorm)], -1), self.eh_proj)

    def forward(self, embedded: Tensor, h: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Draft hidden states; row t predicts id[t+2]."""
        return FUNCTIONS["rms_norm"](self.block(self.combine(embedded, h), cos, sin), self.final_layernorm)

    def unroll(self, embedded: Tensor, h: Tensor, cos: Tensor, sin: Tensor, depths: int) -> list[Tensor]:
        """Hidden states of draft steps 1..depths at every position, as serving computes them.

        Step j at position t continues a chain anchored at t-j+1: it takes the step before at t-1,
        the token t+1, and attends to target-made entries up to the anchor and to the chain's own
        entries after it. Rows t < j-1 have no anchor and mean nothing.
        """
        c, a = self.block.c, self.block.attention
        t = embedded.shape[1]
        p = dict(a.items())
        steps: list[Tensor] = []
        first: tuple[Tensor, Tensor] | None = None
        chain: list[tuple[Tensor, Tensor]] = []
        row = torch.arange(t, device=h.device)
        for j in range(depths):
            u = self.combine(embedded, h)
            x = rms_norm(u, self.block.input_layernorm)
            q, k, v, gate = mla_qkv(x, p, cos, sin, c)
            q = q * (c.nope + c.rope) ** -0.5
            if j == 0:
                first = (k, v)
            else:
                chain.append((k, v))
            score = q @ first[0].mT
            score = score.masked_fill(row[None, :] > row[:, None] - j, -math.inf if j == 0 else -1e30)
            own = []
            for i, (ck, _) in enumerate(chain):
                own.append((q * shift(ck, j - 1 - i, 2)).sum(-1, keepdim=True))
            prob = torch.cat([score.float(), *(s.float() for s in own)], -1).softmax(-1).to(v.dtype)
            o = prob[..., :t] @ first[1]
            for i, (_, cv) in enumerate(chain):
                o = o + prob[..., t + i, None] * shift(cv, j - 1 - i, 2)
            u = u + mla_output(o, gate, a["dense"])
            u = u + self.block.mix(rms_norm(u, self.block.post_attention_layernorm))
            out = rms_norm(u, self.final_layernorm)
            steps.append(out)
            h = shift(out, 1, 1)
        return steps


def shift(x: Tensor, by: int, dim: int) -> Tensor:
    """Move rows later along dim; the first rows become zero."""
    if by == 0:
        return x
    pad = torch.zeros_like(x.narrow(dim, 0, by))
    return torch.cat([pad, x.narrow(dim, 0, x.shape[dim] - by)], dim)


class Pebble(nn.Module):
    """Target and MTP layer, sharing the embedding and the head."""

    def __init__(self, c: Config | None = None):
        super().__init__()
        self.c = c = c or Config()
        self.word_embeddings = weight(c.vocab, c.hidden, std=0.05)
        self.blocks = nn.ModuleList(Block(c, i) for i in range(c.layers))
        self.norm = ones(c.hidden)
        self.lm_head = weight(c.vocab, c.hidden, std=0.02)
        self.mtp = MTP(c)

    def tables(self, t: int, device: torch.device, start: int = 0) -> tuple[Tensor, Tensor]:
        """Rotary tables of positions start..start+t-1."""
        return rope_table(torch.arange(start, start + t, device=device), self.c.rope, self.c.rope_theta)

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings in the compute dtype."""
        h = F.embedding(ids, self.word_embeddings)
        return h.to(torch.get_autocast_dtype(h.device.type)) if torch.is_autocast_enabled(h.device.type) else h

    def forward(self, ids: Tensor) -> Tensor:
        """Hidden states after the final norm, [B,T,D]; logits are ``hidden @ lm_head.T``."""
        cos, sin = self.tables(ids.shape[1], ids.device)
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h, cos, sin)
        return FUNCTIONS["rms_norm"](h, self.norm)

    def moe_blocks(self) -> list[Block]:
        """Layers with a router, the MTP layer last."""
        return [b for b in [*self.blocks, self.mtp.block] if not b.is_dense]

    def count(self) -> int:
        """Stored values: parameters and expert biases."""
        return sum(t.numel() for t in self.state_dict().values())
