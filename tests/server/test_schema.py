"""Requests made from the OpenAPI description, good and bad: every answer is one that the description names."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest

from serving import Served

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed: pip install schemathesis")
from hypothesis import HealthCheck, Phase, given, settings  # noqa: E402
from schemathesis import GenerationMode  # noqa: E402

EXAMPLES = 10


def attempt(served: Served, operation: Any, mode: Any, tried: dict[str, set[int]]) -> None:
    """Some requests of one kind to one route."""
    name, named = f"{operation.method.upper()} {operation.path}", set(operation.definition.raw["responses"])

    @settings(
        max_examples=EXAMPLES, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=operation.as_strategy(generation_mode=mode))
    def one(case: Any) -> None:
        body = case.as_transport_kwargs().get("json")
        status, _, found = served.call(operation.path, body, method=operation.method.upper())
        tried[name].add(status)
        assert str(status) in named and (status < 500 or status == 504), (name, json.dumps(body)[:500], status, found)

    one()


def test_no_answer_surprises() -> None:
    with Served("--request-timeout", "2", "--max-context", "256") as served:
        schema = schemathesis.openapi.from_dict(served.ask("/openapi.json", None))
        tried: dict[str, set[int]] = defaultdict(set)
        for made in schema.get_all_operations():
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                operation = made.ok()
                if mode is GenerationMode.POSITIVE or operation.method == "post":
                    attempt(served, operation, mode, tried)
        assert {200, 400} <= tried["POST /v1/chat/completions"] and len(tried) == 16, dict(tried)
        assert served.call("/health")[0] == 200
