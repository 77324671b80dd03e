"""Serve a model over HTTP, one answer at a time: OpenAI's and SGLang's routes, a line for those who wait, a page.

SGLang's flags are taken where they mean something here; the others are named in a warning or refused.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import typing
import warnings
from typing import Any

from ..binder import add_arguments, bind, flags_given, own_variables
from ..config import EngineConfig
from ..errors import ConfigError, UnsupportedError
from ..server.config import ServerConfig
from . import common

# flag -> why it changes nothing; all take a value but those in SWITCHES
IDLE = {
    "attention-backend": "each op has one measured kernel (see soliton doctor)",
    "decode-attention-backend": "each op has one measured kernel (see soliton doctor)",
    "prefill-attention-backend": "each op has one measured kernel (see soliton doctor)",
    "speculative-draft-attention-backend": "each op has one measured kernel (see soliton doctor)",
    "speculative-attention-mode": "verifying has one way",
    "flashinfer-allreduce-fusion-backend": "one GPU reduces nothing with others",
    "moe-runner-backend": "each op has one measured kernel (see soliton doctor)",
    "linear-attn-decode-backend": "each op has one measured kernel (see soliton doctor)",
    "sampling-backend": "sampling is part of the step",
    "grammar-backend": "grammars are llguidance's",
    "cuda-graph-bs": "the one graph is for one stream",
    "cuda-graph-bs-decode": "the one graph is for one stream",
    "cuda-graph-max-bs": "the one graph is for one stream",
    "page-size": "the context is one contiguous buffer",
    "schedule-policy": "requests are served in the order in which they come",
    "schedule-conservativeness": "requests are served in the order in which they come",
    "stream-interval": "every step is streamed",
    "log-level": "see --log-requests",
    "log-level-http": "see --log-requests",
    "watchdog-timeout": "see --request-timeout",
    "decode-log-interval": "see /metrics",
    "max-total-tokens": "see --max-context",
    "max-prefill-tokens": "see --prefill-chunk",
    "mamba-ssm-dtype": "recurrent states are float32",
    "max-mamba-cache-size": "see --checkpoint-budget",
    "mamba-full-memory-ratio": "see --checkpoint-budget",
    "mamba-scheduler-strategy": "there is one stream",
    "linear-replayssm-cache-len": "states are committed by the verdict",
    "load-format": "checkpoints are safetensors",
    "download-dir": "see the hub's own environment variables",
    "trust-remote-code": "a checkpoint is read as data and none of its code is run",
    "enable-linear-replayssm": "states are committed by the verdict",
    "enable-torch-compile": "the step's kernels are chained by hand",
    "skip-server-warmup": "the engine is warm when it says it is ready",
    "disable-overlap-schedule": "see --run-ahead",
    "enable-mixed-chunk": "there is one stream",
}
SWITCHES = (
    "trust-remote-code", "enable-linear-replayssm", "enable-torch-compile", "skip-server-warmup",
    "disable-overlap-schedule", "enable-mixed-chunk",
)  # fmt: skip
ONLY = {  # flag -> the values that this server can honour
    "tp-size": ("1",), "tensor-parallel-size": ("1",), "tp": ("1",), "ep-size": ("1",), "dp-size": ("1",),
    "pp-size": ("1",), "nnodes": ("1",), "max-running-requests": ("1",), "quantization": ("none", "unquant"),
    "kv-cache-dtype": ("auto",), "speculative-accept-threshold-single": ("1", "1.0"),
    "speculative-accept-threshold-acc": ("1", "1.0"), "speculative-draft-model-quantization": ("none", "unquant"),
    "sampling-defaults": ("model",),
}  # fmt: skip


def add_flags(parser: argparse.ArgumentParser) -> None:
    """MODEL, the engine's flags, the server's, SGLang's."""
    common.add_engine(parser)
    group = parser.add_argument_group("server")
    add_arguments(typing.cast(argparse.ArgumentParser, group), ServerConfig)
    other = parser.add_argument_group("SGLang's", "Other names of settings above, and flags that change nothing here.")
    other.add_argument("--disable-radix-cache", action="store_true", help="as --prefix-reuse off")
    other.add_argument("--enable-fp32-lm-head", action="store_true", help="as --lm-head-dtype float32")
    other.add_argument("--disable-cuda-graph", action="store_true", help="as --executor eager")
    for flag in IDLE:
        action: dict[str, Any] = {"action": "store_true"} if flag in SWITCHES else {"nargs": "+"}
        other.add_argument(f"--{flag}", dest=f"idle.{flag}", help=argparse.SUPPRESS, **action)
    for flag in ONLY:
        other.add_argument(f"--{flag}", dest=f"only.{flag}", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Check everything, then serve until told to end."""
    _sglang(args)
    engine = common.config_given(args)
    env = own_variables(ServerConfig, os.environ)
    server = bind(ServerConfig, flags=flags_given(args, ServerConfig), env=env, file=args.config, table="server")
    return asyncio.run(_serve(server, engine))


def _sglang(args: argparse.Namespace) -> None:
    """SGLang's flags: their meaning, a warning, or a refusal."""
    given = vars(args)
    for flag, reason in IDLE.items():
        if given.get(f"idle.{flag}"):
            warnings.warn(f"--{flag} changes nothing: {reason}", stacklevel=1)
    for flag, possible in ONLY.items():
        value = given.get(f"only.{flag}")
        if value is not None and value.lower() not in possible:
            raise UnsupportedError(f"--{flag} {value}: only {' or '.join(possible)} is possible here")
    for flag, key, value in (
        ("disable_radix_cache", "prefix_reuse", "off"),
        ("enable_fp32_lm_head", "lm_head_dtype", "float32"),
        ("disable_cuda_graph", "executor", "eager"),
    ):
        if given[flag]:
            if given.get(key, value) != value:
                raise ConfigError(f"--{flag.replace('_', '-')} contradicts {key} = {given[key]!r}: give one of them")
            setattr(args, key, value)


async def _serve(server: ServerConfig, engine: EngineConfig) -> int:
    from ..checkpoint import open_checkpoint
    from ..server.app import serve
    from ..server.service import Service

    service = Service(server, engine, open_checkpoint(engine.model))

    def announce(address: str) -> None:
        print(f"{address} loading {engine.model}", file=sys.stderr, flush=True)

    def ready() -> None:
        about = service.about["config"]
        how = "off" if about.speculation == "off" else f"{about.speculation}, {about.speculative_num_draft_tokens} rows"
        text = f"ready: {service.name} on {about.device}, {about.dtype}, context {about.max_context}, speculation {how}"
        print(text, file=sys.stderr, flush=True)

    return await serve(service, announce=announce, ready=ready)
