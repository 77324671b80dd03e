"""The server's own settings: where it listens, who may come, how many may wait."""

from __future__ import annotations

from dataclasses import dataclass

from ..binder import check, setting
from ..errors import ConfigError

PARSERS = ("auto", "ling3", "none")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """One server. The engine has EngineConfig."""

    host: str = setting("address to listen on", default="127.0.0.1")
    port: int = setting("port to listen on; 0 takes a free one", default=30000, low=0, high=65535)
    served_model_name: str | None = setting(
        "the model's name in requests and answers; as --model when unset", default=None
    )
    api_key: str | None = setting("key that requests must bring as a bearer token; none when unset", default=None)
    max_queued_requests: int = setting("requests that may wait; one more gets 429", default=64, unit="requests", low=0)
    request_timeout: float | None = setting(
        "longest time of a request, waiting included; unlimited when unset", default=None, unit="seconds", low=0
    )
    max_body: int | str = setting("largest request body", default="4MiB", unit="bytes", low=1)
    drain_timeout: float = setting(
        "time that SIGTERM leaves to requests in progress", default=30.0, unit="seconds", low=0
    )
    reasoning_parser: str = setting(
        "how reasoning is told from the answer; auto takes ling3 where the template thinks",
        default="auto",
        choices=PARSERS,
    )
    tool_call_parser: str = setting(
        "how tool calls are read; auto takes ling3 where the template offers tools", default="auto", choices=PARSERS
    )
    enable_cache_report: bool = setting("cached tokens in every usage", default=True)
    enable_metrics: bool = setting("serve /metrics", default=True)
    page: bool = setting("serve the page at /", default=True)
    log_requests: bool = setting("a line on stderr for every request, without its text", default=False)

    def __post_init__(self) -> None:
        check(self)
        if self.api_key is not None and not self.api_key.strip():
            raise ConfigError("api_key is empty: leave it out, or give a key")
