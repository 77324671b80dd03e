"""The HTTP side: routes, who may come, how a refusal looks, starting and ending."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from ..errors import ConfigError, RequestError, SolitonError
from . import asks, body, native, replies
from .chat import Chat
from .describe import openapi
from .line import AbortedError, DrainingError, LineFullError
from .service import Active, DeadlineError, LoadingError, NoSuchModel, Service
from .worker import EngineLost

SERVICE = web.AppKey("service", Service)
WRITE_S = 120.0  # a client that takes nothing for so long has left
OPEN = ("/", "/health", "/ping", "/static")  # need no key
STATUS: dict[type[BaseException], tuple[int, str, str | None]] = {  # status, OpenAI's type, OpenAI's code
    RequestError: (400, "invalid_request_error", None),
    NoSuchModel: (404, "invalid_request_error", "model_not_found"),
    LineFullError: (429, "rate_limit_error", "queue_full"),
    AbortedError: (409, "invalid_request_error", "aborted"),
    DeadlineError: (504, "server_error", "deadline_exceeded"),
    LoadingError: (503, "server_error", "loading"),
    DrainingError: (503, "server_error", "draining"),
    EngineLost: (503, "server_error", "engine_lost"),
}
HEADERS = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
FILES = ("index.html", "app.js", "style.css", "icon.svg")
# the page asks nobody but this server, runs no text of an answer as a script, and stands in no frame
PAGE = {
    **HEADERS, "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
}  # fmt: skip
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def fault(error: BaseException) -> tuple[int, dict[str, Any]]:
    """(status, body) of a refusal: OpenAI's error object, and SGLang's flat fields beside it."""
    status, kind, code = next((v for k, v in STATUS.items() if isinstance(error, k)), (500, "server_error", None))
    message = str(error) if isinstance(error, SolitonError) else f"an error inside the server ({type(error).__name__})"
    inner = {
        "message": message, "type": kind, "param": getattr(error, "param", None),
        "code": getattr(error, "code", None) or code,
    }  # fmt: skip
    return status, {"error": inner, "object": "error", **inner}


def refusal(error: BaseException) -> web.Response:
    """The same as a response."""
    status, said = fault(error)
    headers = {"Retry-After": "1"} if status in (429, 503) else {}
    return web.json_response(said, status=status, headers=headers)


@web.middleware
async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Keys, refusals and lost paths; whatever a handler raises becomes a body that clients understand."""
    service = request.app[SERVICE]
    key, path = service.config.api_key, request.path
    if key is not None and not (path in OPEN or path.startswith("/static/")):
        kind, _, given = request.headers.get("Authorization", "").partition(" ")
        same = hmac.compare_digest(given.strip().encode(errors="surrogateescape"), key.encode(errors="surrogateescape"))
        if kind.lower() != "bearer" or not same:
            error = {"message": "the API key is missing or wrong; send it as a bearer token", "param": None}
            error |= {"type": "invalid_request_error", "code": "invalid_api_key"}
            headers = {"WWW-Authenticate": "Bearer"}
            return web.json_response({"error": error, "object": "error", **error}, status=401, headers=headers)
    origin = request.headers.get("Origin")
    if origin is not None and request.method == "POST" and urlsplit(origin).netloc != request.host:
        error = {"message": "pages of other origins may not ask here", "param": None}
        error |= {"type": "invalid_request_error", "code": "foreign_origin"}
        return web.json_response({"error": error, "object": "error", **error}, status=403)
    began = time.perf_counter()
    status = 499
    try:
        response = await handler(request)
        status = response.status
        return response
    except web.HTTPException as error:
        status = error.status
        said = {404: f"no such path {path!r}", 405: f"{request.method} is not for {path!r}"}.get(status, error.reason)
        if status == 413:
            said = f"the body is larger than the {service.max_body} bytes that this server takes"
        inner = {"message": said, "type": "invalid_request_error", "param": None, "code": None}
        headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
        return web.json_response({"error": inner, "object": "error", **inner}, status=status, headers=headers)
    except web.RequestPayloadError:
        response = refusal(RequestError("the body cannot be read: its encoding or its chunks are broken"))
        status = response.status
        return response
    except ConnectionResetError:  # the client left while it was written to
        raise
    except Exception as error:
        response = refusal(error)
        status = response.status
        if status == 500:
            traceback.print_exception(error)
        return response
    finally:
        if service.config.log_requests:
            took = (time.perf_counter() - began) * 1e3
            print(f"{request.method} {path} {status} {took:.1f} ms", file=sys.stderr, flush=True)


async def fields(request: web.Request) -> tuple[dict[str, Any], int]:
    """The JSON object of a request, and its bytes."""
    raw = await request.read()
    return body.parse(raw), len(raw)


async def _answer(request: web.Request, active: Active, writer: replies.Writer) -> web.StreamResponse:
    """Wait for the turn, then send what the writer makes, as events or whole."""
    service = request.app[SERVICE]
    turn, pieces = await service.turn(active)
    headers = {
        **HEADERS, "X-Request-Id": active.rid(), "X-Queue-Position": str(turn.position),
        "X-Queue-Wait-Ms": f"{turn.waited_s * 1e3:.1f}",
    }  # fmt: skip
    try:
        if not active.ask.stream:
            async for place, piece in pieces:
                writer.push(place, piece)
            return web.json_response(writer.whole(), headers=headers)
        response = web.StreamResponse(headers={**headers, "Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        try:
            async for place, piece in pieces:
                for event in writer.push(place, piece):
                    await _send(response, event)
            for event in writer.end():
                await _send(response, event)
        except (SolitonError, RuntimeError) as error:
            await _send(response, fault(error)[1])
        await asyncio.wait_for(response.write(b"data: [DONE]\n\n"), WRITE_S)
        await response.write_eof()
        return response
    finally:
        await pieces.aclose()


async def _send(response: web.StreamResponse, event: Any) -> None:
    data = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
    await asyncio.wait_for(response.write(f"data: {data}\n\n".encode(errors="replace")), WRITE_S)


async def completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions"""
    service = request.app[SERVICE]
    given, size = await fields(request)
    model, ask = asks.completion(given)
    service.check(model)
    active = await service.enter(ask, "cmpl", size)
    return await _answer(request, active, replies.Completion(service, active))


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions"""
    service = request.app[SERVICE]
    given, size = await fields(request)
    model, ask = asks.chat(given)
    service.check(model)
    chat = await Chat.prepared(service, ask, size)
    return await _answer(request, chat.active, chat)


async def generate(request: web.Request) -> web.StreamResponse:
    """POST /generate"""
    service = request.app[SERVICE]
    given, size = await fields(request)
    ask = asks.native(given)
    service.check(None)
    active = await service.enter(ask, "gen", size)
    return await _answer(request, active, replies.Native(service, active))


async def page(request: web.Request) -> web.StreamResponse:
    """GET / and /static/NAME"""
    name = request.match_info.get("name", "index.html")
    if name not in FILES:
        raise web.HTTPNotFound
    return web.FileResponse(Path(__file__).parent / "static" / name, headers=PAGE)


def application(service: Service) -> web.Application:
    """The routes over a service."""
    app = web.Application(middlewares=[guard], client_max_size=service.max_body)
    app[SERVICE] = service
    routes = [
        web.post("/v1/completions", completions),
        web.post("/v1/chat/completions", chat_completions),
        web.post("/generate", generate),
        *native.routes(),
    ]
    description = openapi()

    async def describe(request: web.Request) -> web.StreamResponse:
        return web.json_response(description)

    routes.append(web.get("/openapi.json", describe))
    if service.config.page:
        routes += [web.get("/", page), web.get("/static/{name}", page)]
    app.add_routes(routes)
    return app


async def serve(service: Service, *, announce: Callable[[str], None], ready: Callable[[], None]) -> int:
    """Listen, load, and run until SIGTERM, SIGINT or the engine's end; the exit code. Health is 503 while loading."""
    config = service.config
    # what handlers raise is said by ``guard``; what is left is broken requests, of which a client is told anyway
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    runner = web.AppRunner(
        application(service), access_log=None, handler_cancellation=True, shutdown_timeout=1.0, keepalive_timeout=75.0
    )
    await runner.setup()
    site = web.TCPSite(runner, config.host, config.port, backlog=512)
    try:
        await site.start()
    except OSError as error:
        await runner.cleanup()
        reason = error.strerror or error
        raise ConfigError(f"cannot listen on {config.host} port {config.port} ({reason}); choose others") from error
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    announce(f"http://{config.host}:{port}")
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    loading = loop.create_task(service.load())
    waits = [loop.create_task(ended.wait()), loop.create_task(service.engine.lost.wait())]
    try:
        await asyncio.wait([loading, *waits], return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            loading.result()  # EngineLost with the reason
            ready()
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if not ended.is_set():
            print(f"soliton: {service.engine.fault}", file=sys.stderr, flush=True)
            return 1
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)  # a second one ends it at once
            signal.signal(number, lambda *_: os._exit(130))
        try:
            await asyncio.wait_for(service.line.drained(), config.drain_timeout)
        except TimeoutError:
            print(f"soliton: requests were cut after {config.drain_timeout:g} s of drain", file=sys.stderr)
        return 0
    finally:
        loading.cancel()
        for task in waits:
            task.cancel()
        await service.stop()
        await runner.cleanup()
