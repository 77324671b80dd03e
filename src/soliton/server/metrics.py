"""What /metrics tells, under SGLang's names where it has them. All of it is counted in the server's process."""

from __future__ import annotations

from collections import Counter as Tally
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

if TYPE_CHECKING:
    from ..engine import Piece, Stats

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKEN_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class Metrics:
    """Counters of one server, of its own registry. steps, tokens: of verify steps since the start."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self.tokens = self.steps = 0
        self.rate = 0.0
        self._model = model
        self._prompt = self._counter("prompt_tokens", "tokens of prompts")
        self._generated = self._counter("generation_tokens", "tokens of answers")
        self._cached = self._counter("cached_tokens", "tokens of prompts that a prefix checkpoint spared")
        self._requests = self._counter("num_requests", "requests that got their turn")
        self._aborted = self._counter("num_aborted_requests", "requests whose client left, or that were aborted")
        self._verify = self._counter("spec_verify_ct", "steps that verified drafts")
        self._accepted = self._counter("spec_num_correct_drafts", "drafts that were accepted")
        self._ttft = self._histogram("time_to_first_token_seconds", "from the turn to the first token", SECONDS)
        self._tpot = self._histogram("time_per_output_token_seconds", "mean time of an answer's later tokens", TOKEN_S)
        self._e2e = self._histogram("e2e_request_latency_seconds", "from arrival to the last token", SECONDS)
        self._wait = self._histogram("queue_time_seconds", "from arrival to the turn", SECONDS)
        self._running = self._gauge("num_running_reqs", "requests being answered: 0 or 1")
        self._queued = self._gauge("num_queue_reqs", "requests that wait")
        self._length = self._gauge("spec_accept_length", "tokens a verify step, since the start")
        self._throughput = self._gauge("gen_throughput", "tokens a second of the last answer")
        self._hits = self._gauge("cache_hit_rate", "share of prompt tokens that were cached, since the start")
        self._totals: Tally[str] = Tally()

    def piece(self, piece: Piece, first: bool) -> None:
        """Every piece of an answer. first: its step had no drafts."""
        count = len(piece.token_ids)
        self._generated.labels(self._model).inc(count)
        if not first and count:
            self.tokens, self.steps = self.tokens + count, self.steps + 1
            self._verify.labels(self._model).inc()
            self._accepted.labels(self._model).inc(count - 1)

    def answered(self, stats: Stats, *, waited_s: float, total_s: float) -> None:
        """The end of an answer."""
        self._totals["prompt"] += stats.prompt_tokens
        self._totals["cached"] += stats.cached_tokens
        self._prompt.labels(self._model).inc(stats.prompt_tokens)
        self._cached.labels(self._model).inc(stats.cached_tokens)
        self._ttft.labels(self._model).observe(stats.ttft_s)
        self._wait.labels(self._model).observe(waited_s)
        self._e2e.labels(self._model).observe(total_s)
        if stats.tpot_s:
            self._tpot.labels(self._model).observe(stats.tpot_s)
            self.rate = 1 / stats.tpot_s

    def begun(self) -> None:
        """A request got its turn."""
        self._requests.labels(self._model).inc()

    def aborted(self) -> None:
        """A request ended before its answer did."""
        self._aborted.labels(self._model).inc()

    @property
    def accept_length(self) -> float | None:
        """Tokens a verify step since the start; None before the first."""
        return self.tokens / self.steps if self.steps else None

    def text(self, running: bool, waiting: int) -> bytes:
        """The page of Prometheus' text format."""
        self._running.labels(self._model).set(int(running))
        self._queued.labels(self._model).set(waiting)
        self._length.labels(self._model).set(self.accept_length or 0.0)
        self._throughput.labels(self._model).set(self.rate)
        self._hits.labels(self._model).set(self._totals["cached"] / max(self._totals["prompt"], 1))
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"sglang:{name}", text, ["model_name"], registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"sglang:{name}", text, ["model_name"], registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"sglang:{name}", text, ["model_name"], registry=self.registry, buckets=buckets)
