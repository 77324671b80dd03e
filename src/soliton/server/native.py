"""SGLang's small routes, and OpenAI's list of models: what benchmark clients and routers ask beside answers."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from ..errors import RequestError
from ..measure.doctor import versions
from ..prompt import encode
from .asks import check_message
from .body import Body, parse
from .line import DrainingError

if TYPE_CHECKING:
    from .service import Service

VERSION = "0.5.23"  # of SGLang, whose contract these routes keep: routers look at it


def _service(request: web.Request) -> Service:
    from .app import SERVICE

    return request.app[SERVICE]


async def health(request: web.Request) -> web.Response:
    """Whether answers can be had."""
    _healthy(_service(request))
    return web.Response(text="")


def _healthy(service: Service) -> None:
    service.check(None)
    if service.line.draining:
        raise DrainingError("the server is ending")


async def health_generate(request: web.Request) -> web.Response:
    """Whether one token can be had; a server that is answering somebody shows that by itself."""
    from . import asks

    service = _service(request)
    _healthy(service)
    if not service.line.running:
        ask = asks.native({"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0}})
        active = await service.enter(ask, "health")
        _, pieces = await service.turn(active)
        async for _ in pieces:
            pass
    return web.Response(text="")


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.name, "object": "model", "created": int(service.started), "owned_by": "soliton",
        "root": service.name, "parent": None, "max_model_len": service.max_context if service.about else None,
    }  # fmt: skip


async def models(request: web.Request) -> web.Response:
    """GET /v1/models"""
    return web.json_response({"object": "list", "data": [_model(_service(request))]})


async def model(request: web.Request) -> web.Response:
    """GET /v1/models/NAME"""
    from .service import NoSuchModel

    service, name = _service(request), request.match_info["name"]
    if name != service.name:
        raise NoSuchModel(f"the model {name!r} is not served here; this is {service.name!r}")
    return web.json_response(_model(service))


async def model_info(request: web.Request) -> web.Response:
    """GET /model_info and /get_model_info"""
    service = _service(request)
    service.check(None)
    path = str(service.checkpoint.path or service.about["config"].model)
    return web.json_response(
        {
            "model_path": path,
            "tokenizer_path": path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": "default",
            "served_model_name": service.name,
            "max_context": service.max_context,
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": "soliton",
        }
    )


async def server_info(request: web.Request) -> web.Response:
    """GET /server_info and /get_server_info: settings, decisions, and what has been accepted since the start."""
    service = _service(request)
    service.check(None)
    config = service.about["config"]
    own = {k: v for k, v in dataclasses.asdict(service.config).items() if k != "api_key"}
    state = {
        "last_gen_throughput": service.metrics.rate,
        "avg_spec_accept_length": service.metrics.accept_length,
        "memory_usage": service.about["memory"],
    }
    metrics = service.metrics
    return web.json_response(
        {
            **dataclasses.asdict(config),
            **own,
            "model_path": config.model,
            "tokenizer_path": config.model,
            "served_model_name": service.name,
            "context_length": config.max_context,
            "tp_size": 1,
            "dp_size": 1,
            "speculative_algorithm": None if config.speculation == "off" else config.speculation.upper(),
            "max_running_requests": 1,
            "status": "ready",
            "version": VERSION,
            "soliton_version": versions()["soliton"],
            "max_total_num_tokens": config.max_context,
            "decisions": service.about["decisions"],
            "internal_states": [state],
            "spec_verify_steps": metrics.steps,
            "spec_tokens": metrics.tokens,
            "running": service.line.running,
            "queued": service.line.waiting,
            "uptime_s": round(time.time() - service.started, 3),
        }
    )


async def load(request: web.Request) -> web.Response:
    """GET /get_load: what a router weighs replicas by."""
    service = _service(request)
    running, waiting = int(service.line.running), service.line.waiting
    return web.json_response(
        [{"dp_rank": 0, "num_reqs": running + waiting, "num_waiting_reqs": waiting, "num_tokens": 0}]
    )


async def flush_cache(request: web.Request) -> web.Response:
    """Forget all prefix checkpoints, when nobody is being answered any more."""
    service = _service(request)
    service.check(None)
    async with service.line.turn():
        await service.engine.flush()
    return web.Response(text="Cache flushed.\n")


async def abort_request(request: web.Request) -> web.Response:
    """End the request with this rid, or all of them."""
    service = _service(request)
    given = Body(parse(await request.read()))
    rid, everything = given.take("rid", str), given.take("abort_all", bool, default=False)
    given.ignore(["abort_message", "finished_reason"])
    given.end()
    if rid is None and not everything:
        raise RequestError("give a rid, or abort_all = true", param="rid")
    return web.json_response({"aborted": service.abort(None if everything else rid)})


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics"""
    service = _service(request)
    if not service.config.enable_metrics:
        raise web.HTTPNotFound
    text = service.metrics.text(service.line.running, service.line.waiting)
    return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})


async def tokenize(request: web.Request) -> web.Response:
    """POST /tokenize: ids of a text, of several, or of messages."""
    service, raw = _service(request), await request.read()
    given = Body(parse(raw))
    prompt, messages = given.take("prompt", str, list), given.take("messages", list)
    special = given.take("add_special_tokens", bool, default=False)
    given.ignore(["model", "return_token_strs"])
    given.end()
    if (prompt is None) == (messages is None):
        raise RequestError("give either prompt or messages", param="prompt")
    several = isinstance(prompt, list)
    if messages is not None and not messages:
        raise RequestError("messages is empty", param="messages")
    for place, message in enumerate(messages or []):
        check_message(place, message)
    if several and not all(isinstance(text, str) for text in prompt):
        raise RequestError("prompt holds something that is no text", param="prompt")
    tokenizer = service.checkpoint.tokenizer

    def ids(text: Any) -> list[int]:
        if isinstance(text, str) and tokenizer is not None:
            return tokenizer.encode(text, add_special=special)
        return encode(service.checkpoint, text, {})[0]

    texts = prompt if several and prompt is not None else [prompt if prompt is not None else messages]
    found = await service.aside(len(raw), lambda: [ids(text) for text in texts])
    counts = [len(ids) for ids in found]
    limit = service.max_context if service.about else None
    out = {"tokens": found, "count": counts} if several else {"tokens": found[0], "count": counts[0]}
    return web.json_response({**out, "max_model_len": limit})


async def detokenize(request: web.Request) -> web.Response:
    """POST /detokenize: the text of ids, or of several lists of them."""
    service = _service(request)
    given = Body(parse(await request.read()))
    tokens, skip = given.take("tokens", list), given.take("skip_special_tokens", bool, default=True)
    given.ignore(["model"])
    given.end()
    if tokens is None:
        raise RequestError("tokens is missing", param="tokens")
    tokenizer = service.checkpoint.tokenizer
    if tokenizer is None:
        raise RequestError(f"{service.name} has no tokenizer", param="tokens")
    several = bool(tokens) and all(isinstance(item, list) for item in tokens)
    texts: list[str] = []
    for ids in tokens if several else [tokens]:
        if not all(type(token) is int and 0 <= token < service.checkpoint.spec.vocab for token in ids):
            raise RequestError("tokens holds something that is no token id", param="tokens")
        texts.append(tokenizer.decode(ids, skip_special=skip))
    return web.json_response({"text": texts if several else texts[0]})


def routes() -> list[web.RouteDef]:
    """All of them, under every spelling in use."""
    found: list[web.RouteDef] = [
        web.get("/ping", health), web.get("/health", health), web.get("/health_generate", health_generate),
        web.get("/v1/models", models), web.get("/v1/models/{name:.+}", model), web.get("/metrics", metrics),
        web.get("/get_load", load), web.post("/abort_request", abort_request),
        web.post("/flush_cache", flush_cache), web.get("/flush_cache", flush_cache),
    ]  # fmt: skip
    for prefix in ("", "/get_"):
        path = prefix if prefix else "/"
        found += [web.get(f"{path}model_info", model_info), web.get(f"{path}server_info", server_info)]
    for prefix in ("", "/v1"):
        found += [web.post(f"{prefix}/tokenize", tokenize), web.post(f"{prefix}/detokenize", detokenize)]
    return found
