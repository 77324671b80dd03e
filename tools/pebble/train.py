"""Train pebble: the joint phase, then the MTP layer alone as a draft of the frozen target.

    python tools/pebble/train.py main --data DATA --run RUN --seconds 780 --call-seconds 560
    python tools/pebble/train.py draft --data DATA --run RUN --seconds 200

A run directory holds state.pt (everything needed to go on), weights.pt, metrics.jsonl and
provenance.json. ``main`` stops after --call-seconds and goes on when called again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import math
import os
import platform
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from accept import measure
from decode import Decoder
from model import FUNCTIONS, Config, Pebble, compile_functions, kda_chunk, kda_fused
from optim import Optimiser, balance
from torch import Tensor


def load_tokens(path: Path, device: torch.device) -> tuple[Tensor, str]:
    """Token ids of a packed file on the device, and the digest of the unpacked bytes."""
    raw = lzma.decompress(path.read_bytes())
    return torch.from_numpy(np.frombuffer(raw, "<u2").astype(np.int32)).to(device), hashlib.sha256(raw).hexdigest()


class Windows:
    """Windows of consecutive tokens; each epoch visits all, in a new order and from a new offset."""

    def __init__(self, tokens: Tensor, length: int, seed: int):
        self.tokens, self.length, self.seed = tokens, length, seed
        self.count = (len(tokens) - 2 - length) // length
        self.epoch = -1
        self.order: Tensor | None = None
        self.span = torch.arange(length + 2, device=tokens.device)

    def batch(self, step: int, size: int) -> Tensor:
        """Windows number step*size.. of the endless sequence, [size, length+2]."""
        epoch, first = divmod(step * size, self.count - self.count % size)
        if epoch != self.epoch:
            rng = torch.Generator().manual_seed(self.seed * 1000 + epoch)
            offset = int(torch.randint(self.length, (1,), generator=rng)) if epoch else 0
            order = torch.randperm(self.count, generator=rng) * self.length + offset
            self.epoch, self.order = epoch, order.to(self.tokens.device)
        starts = self.order[first : first + size]
        return self.tokens[starts[:, None] + self.span].long()


def cross_entropy(h: Tensor, head: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy of the head's logits."""
    return F.cross_entropy(F.linear(h, head).float().flatten(0, 1), target.flatten())


def distil(m: Tensor, head: Tensor, teacher: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted mix of soft and hard cross-entropy to the teacher's logits; also the student's choices."""
    logits = F.linear(m, head).float()
    teacher = teacher.float()
    logp = logits.log_softmax(-1)
    best = teacher.argmax(-1)
    soft = -(teacher.softmax(-1) * logp).sum(-1)
    hard = -logp.gather(-1, best[..., None])[..., 0]
    return ((0.5 * soft + 0.5 * hard) * weights).sum() / weights.sum(), logits.argmax(-1)


class Run:
    """Paths, metrics and provenance of one training run."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.dir = args, Path(args.run)
        self.dir.mkdir(parents=True, exist_ok=True)
        self.start = time.time()
        self.log = (self.dir / "metrics.jsonl").open("a")

    def elapsed(self) -> float:
        """Seconds since this call began."""
        return time.time() - self.start

    def write(self, **row: object) -> None:
        """One metrics line, also printed."""
        line = json.dumps({"phase": self.args.phase, **row})
        self.log.write(line + "\n")
        self.log.flush()
        print(line, flush=True)

    def provenance(self, **facts: object) -> None:
        """Merge facts of this phase into provenance.json."""
        path = self.dir / "provenance.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        arguments = {k: v for k, v in vars(self.args).items() if k not in ("data", "run", "prompts")}
        versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
        if torch.cuda.is_available():
            from importlib.metadata import version

            import triton

            versions |= {"triton": triton.__version__, "fla-core": version("fla-core")}
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        known.setdefault(self.args.phase, {}).update(arguments=arguments, versions=versions, device=device, **facts)
        path.write_text(json.dumps(known, indent=1) + "\n")


def few_configurations(limit: int = 3) -> None:
    """Keep fla's autotuning short: a few configurations a kernel instead of dozens."""
    import fla.ops.kda  # noqa: F401
    from triton.runtime.autotuner import Autotuner

    for name, module in list(sys.modules.items()):
        if name.startswith("fla."):
            for kernel in list(vars(module).values()):
                while kernel is not None and not isinstance(kernel, Autotuner):
                    kernel = getattr(kernel, "fn", None) if type(kernel).__module__.startswith("triton") else None
                if kernel is not None and len(kernel.configs) > limit:
                    sane = [c for c in kernel.configs if c.num_warps in (4, 8) and c.num_stages in (2, 3)]
                    sane = sane if len(sane) >= limit else kernel.configs
                    kernel.configs = [sane[i * (len(sane) - 1) // (limit - 1)] for i in range(limit)]


def check_kernels(device: torch.device) -> None:
    """Compare the fused recurrence with the plain one, values and gradients."""
    torch.manual_seed(1)
    shape = (8, 2048, 2, 128)
    q, k = (F.normalize(torch.randn(shape, device=device), dim=-1) for _ in range(2))
    v, g = torch.randn(shape, device=device), -5 * torch.sigmoid(torch.randn(shape, device=device) * 2 - 3)
    beta = torch.rand(shape[:3], device=device)
    results = []
    for run in (kda_fused, kda_chunk):
        inputs = [x.bfloat16().requires_grad_() for x in (q, k, v)] + [x.clone().requires_grad_() for x in (g, beta)]
        out = run(*inputs)
        (out.float() * torch.linspace(-1, 1, 128, device=device)).sum().backward()
        results.append([out.float(), *(x.grad.float() for x in inputs)])
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(*results, strict=True)]
    print("fused recurrence against plain (o, dq, dk, dv, dg, dbeta):", [round(e, 4) for e in errors], flush=True)
    assert max(errors) < 0.05, errors


def validate(model: Pebble, windows: Windows, head_loss, size: int, batches: int) -> tuple[float, float]:
    """Held-out loss of the target and of the MTP layer's first draft, nats a token."""
    total = torch.zeros(2, device=model.norm.device)
    for i in range(batches):
        ids = windows.batch(i, size)
        h = model(ids[:, :-2])
        total[0] += head_loss(h, model.lm_head, ids[:, 1:-1]).detach()
        cos, sin = model.tables(h.shape[1], h.device)
        m = model.mtp(model.embed(ids[:, 1:-1]), h, cos, sin)
        total[1] += head_loss(m, model.lm_head, ids[:, 2:]).detach()
    return tuple(round(x, 4) for x in (total / batches).tolist())


def train_main(run: Run, model: Pebble, device: torch.device) -> None:
    """The joint phase: next token, and the token after it through the MTP layer."""
    a = run.args
    tokens, digest = load_tokens(Path(a.data) / "train.u16.xz", device)
    held, _ = load_tokens(Path(a.data) / "heldout.u16.xz", device)
    windows, held_windows = Windows(tokens, a.length, a.seed), Windows(held, a.length, 1)
    optimiser = Optimiser(list(model.named_parameters()), a.muon_lr, a.adam_lr, a.decay)
    head_loss = torch.compile(cross_entropy, dynamic=False) if a.compile else cross_entropy
    step, total, spent = 0, a.steps, 0.0
    state = run.dir / "state.pt"
    if state.exists():
        saved = torch.load(state, map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimiser.load_state_dict(saved["optimiser"])
        step, total, spent = saved["step"], saved["total"], saved["spent"]
    run.write(event="start", step=step, tokens=len(tokens), ready_seconds=round(run.elapsed(), 1))
    cos, sin = model.tables(a.length, device)
    validations = max(min(16, held_windows.count // a.batch), 1)
    mark, mark_step = time.time(), step
    begun, first_step = None, step
    while not total or step < total:
        if run.elapsed() > a.call_seconds:
            break
        progress = step / total if total else 0.0
        factor = min((step + 1) / a.warmup, 1.0)
        if progress > a.hold:
            factor *= a.floor + (1 - a.floor) * (1 - progress) / (1 - a.hold)
        ids = windows.batch(step, a.batch)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            h = model(ids[:, :-2])
            loss = head_loss(h, model.lm_head, ids[:, 1:-1])
            m = model.mtp(model.embed(ids[:, 1:-1]), h, cos, sin)
            ahead = head_loss(m, model.lm_head, ids[:, 2:])
        (loss + a.mtp_weight * ahead).backward()
        norm = optimiser.step(factor)
        balance(model, 1e-3 * (factor if progress > a.hold else 1.0))
        step += 1
        if step - first_step == 10:
            if device.type == "cuda":
                torch.cuda.synchronize()
            begun = time.time()
            run.write(event="warm", seconds=round(run.elapsed(), 1))
        if not total and step - first_step == 40:
            if device.type == "cuda":
                torch.cuda.synchronize()
            total = int(a.seconds / ((time.time() - begun) / 30))
            run.write(event="plan", steps=total, tokens_a_second=round(30 * ids[:, 2:].numel() / (time.time() - begun)))
        if step % a.log_every == 0:
            values = torch.stack([loss, ahead, norm]).tolist()
            if not all(map(math.isfinite, values)):
                raise FloatingPointError(f"step {step}: loss, ahead, norm = {values}")
            now = time.time()
            rate = (step - mark_step) * ids[:, 2:].numel() / (now - mark)
            mark, mark_step = now, step
            names = ("loss", "mtp_loss", "norm")
            run.write(
                step=step,
                **dict(zip(names, (round(x, 4) for x in values), strict=True)),
                lr=round(factor, 4),
                tokens_a_second=round(rate),
            )
        if step % a.validate_every == 0:
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                run.write(step=step, heldout=validate(model, held_windows, head_loss, a.batch, 4))
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        held_loss = validate(model, held_windows, head_loss, a.batch, validations)
    spent += run.elapsed()
    loads = [[round(x, 3) for x in b.load.tolist()] for b in model.moe_blocks()]
    run.write(event="stop", step=step, total=total, heldout=held_loss, seconds=round(spent, 1), expert_load=loads)
    saved = {"model": model.state_dict(), "optimiser": optimiser.state_dict(), "step": step, "total": total}
    torch.save(saved | {"spent": spent}, state)
    torch.save(model.state_dict(), run.dir / "weights.pt")
    run.provenance(
        data_sha256=digest,
        tokens=len(tokens),
        steps=step,
        planned_steps=total,
        seconds=round(spent, 1),
        tokens_seen=step * a.batch * a.length,
        heldout_loss=held_loss,
    )


@torch.no_grad()
def write_texts(model: Pebble, tokens: Tensor, rows: int, length: int, seed: int) -> Tensor:
    """The target's own continuations of training text, [kept, length]; looping rows are left out.

    Contexts are 48 to 320 tokens. Half of the rows are greedy, half sampled at temperature 0.6.
    """
    device = tokens.device
    rng = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(tokens) - length, (rows,), generator=rng).to(device)
    ids = tokens[starts[:, None] + torch.arange(length, device=device)].long()
    context = torch.randint(48, 320, (rows,), generator=rng).to(device)
    heat = torch.where(torch.arange(rows, device=device) % 2 == 0, 0.0, 0.6)[:, None]
    decoder = Decoder(model, rows, length)
    for t in range(length - 1):
        logits = decoder.step(ids[:, t])
        logits = logits - heat * torch.log(-torch.log(torch.rand_like(logits).clamp_(1e-9, 1 - 1e-7)))
        ids[:, t + 1] = torch.where(context > t + 1, ids[:, t + 1], logits.argmax(-1))
    tail = ids[:, -128:].sort(-1).values
    distinct = (tail[:, 1:] != tail[:, :-1]).sum(-1)
    return ids[distinct > 36]


def train_draft(run: Run, model: Pebble, device: torch.device) -> None:
    """The MTP layer unrolled as a chain, taught by the frozen target on its own texts and on training text."""
    a = run.args
    tokens, digest = load_tokens(Path(a.data) / "train.u16.xz", device)
    model.load_state_dict(torch.load(run.dir / "weights.pt", map_location=device, weights_only=True))
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith("mtp."))
    trained = [(n, p) for n, p in model.named_parameters() if n.startswith("mtp.")]
    optimiser = Optimiser(trained, a.muon_lr, a.adam_lr, a.decay)
    loss_of = torch.compile(distil, dynamic=False) if a.compile else distil
    cast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    report(run, model, "before")
    written = []
    with cast:
        while run.elapsed() < a.write_seconds or not written:
            written.append(write_texts(model, tokens, a.rows, a.span, a.seed + len(written)).int())
    pool = torch.cat(written)
    run.write(event="written", rows=len(pool), of=a.rows * len(written), seconds=round(run.elapsed(), 1))
    cos, sin = model.tables(a.span, device)
    per_step = a.batch * a.length // a.span
    own = int(per_step * a.own_share) if len(pool) > per_step else 0
    rng = torch.Generator(device="cpu").manual_seed(a.seed)
    begun, step = time.time(), 0
    span = torch.arange(a.span, device=device)
    while (progress := (time.time() - begun) / a.seconds) < 1 and not (a.steps and step >= a.steps):
        picked = pool[torch.randint(len(pool), (own,), generator=rng).to(device)].long()
        starts = torch.randint(len(tokens) - a.span, (per_step - own,), generator=rng).to(device)
        ids = torch.cat([picked, tokens[starts[:, None] + span].long()])
        with cast:
            with torch.no_grad():
                h = model(ids.view(a.batch, a.length)).view(per_step, a.span, -1)
                teacher = F.linear(h, model.lm_head).roll(-1, 1)
                best = teacher.argmax(-1)
                embedded = model.embed(ids.roll(-1, 1))
            # Row t of draft step j guesses id[t+2]; it counts fully where the chain up to it was right.
            live = torch.ones_like(best, dtype=torch.bool)
            live[:, :16] = live[:, -2:] = False
            inside = live.clone()
            total, shown = torch.zeros((), device=device), []
            for j, m in enumerate(model.mtp.unroll(embedded, h, cos, sin, a.depths)):
                inside[:, 16 : 16 + j] = False
                loss, guess = loss_of(m, model.lm_head, teacher, 0.15 * inside + 0.85 * live)
                total = total + loss * 0.85**j
                shown.append(((guess == best) & live).sum() / live.sum().clamp(min=1))
                follows = live & (guess == ids.roll(-2, 1))
                live = follows.roll(1, 1) & inside
        total.backward()
        factor = min((step + 1) / 30, 1.0) * (a.floor + (1 - a.floor) * (1 - progress))
        optimiser.step(factor)
        step += 1
        if step % a.log_every == 0:
            run.write(
                step=step,
                loss=round(float(total.detach()), 4),
                agreement=[round(float(x), 4) for x in shown],
                lr=round(factor, 4),
                seconds=round(run.elapsed(), 1),
            )
    torch.save(model.state_dict(), run.dir / "weights.pt")
    facts = report(run, model, "after")
    run.provenance(data_sha256=digest, steps=step, seconds=round(run.elapsed(), 1), own_rows=len(pool), accept=facts)


def report(run: Run, model: Pebble, when: str) -> dict:
    """Accept lengths on the held-out prompts, if given; compiled functions are set aside for the odd shapes."""
    if not run.args.prompts:
        return {}
    prompts = [json.loads(line)["ids"] for line in Path(run.args.prompts).read_text().splitlines()]
    kept = dict(FUNCTIONS)
    FUNCTIONS.update({n: getattr(f, "_torchdynamo_orig_callable", f) for n, f in kept.items()})
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    facts = measure(model, prompts, 128, {0, 1})
    torch.set_float32_matmul_precision(precision)
    FUNCTIONS.update(kept)
    facts.pop("continuations")
    run.write(event="accept", when=when, **facts)
    return facts


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("phase", choices=["main", "draft"])
    parser.add_argument("--data", required=True, help="folder of train.u16.xz and heldout.u16.xz")
    parser.add_argument("--run", required=True)
    parser.add_argument("--prompts", help="JSONL of {ids}: held-out prompts to measure the accept length on")
    parser.add_argument("--seconds", type=float, required=True, help="training seconds of the whole phase")
    parser.add_argument("--call-seconds", type=float, default=1e9, help="stop this call after so long")
    parser.add_argument("--steps", type=int, default=0, help="fix the number of steps instead")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--span", type=int, default=512, help="draft: tokens of one text")
    parser.add_argument("--rows", type=int, default=4096, help="draft: texts written at a time")
    parser.add_argument("--write-seconds", type=float, default=60)
    parser.add_argument("--own-share", type=float, default=0.8)
    parser.add_argument("--depths", type=int, default=5)
    parser.add_argument("--muon-lr", type=float, default=6e-3)
    parser.add_argument("--adam-lr", type=float, default=3e-3)
    parser.add_argument("--decay", type=float, default=0.1)
    parser.add_argument("--mtp-weight", type=float, default=0.3)
    parser.add_argument("--warmup", type=int, default=150)
    parser.add_argument("--hold", type=float, default=0.3, help="share of the steps before the linear decay")
    parser.add_argument("--floor", type=float, default=0.01)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--validate-every", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    run = Run(args)
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        few_configurations()
        check_kernels(device)
        print(f"kernels ready after {run.elapsed():.0f} s", flush=True)
    if args.compile:
        compile_functions()
    model = Pebble(Config()).to(device)
    {"main": train_main, "draft": train_draft}[args.phase](run, model, device)


if __name__ == "__main__":
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    sys.exit(main())
