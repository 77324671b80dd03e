"""Bad requests: the cases with known answers, every field's wrong types, and that nothing of it hurts the next one."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from serving import Served

CASES = json.loads((Path(__file__).parents[1] / "data/protocol/openai_errors.json").read_text())
CASES = CASES["cases"] if isinstance(CASES, dict) else CASES
GOOD = {"prompt": "def add(a, b):\n", "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def text(served: Served) -> str:
    return served.ask("/v1/completions", GOOD)["choices"][0]["text"]


def filled(value: Any) -> Any:
    """A case's body with the placeholders of this server."""
    if isinstance(value, dict):
        return {key: filled(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [filled(inner) for inner in value]
    return {"$MODEL": "pebble", "$LONGER_THAN_CONTEXT": "word " * 9000}.get(value, value) if value else value


def agrees(wanted: dict[str, Any], status: int, body: Any) -> bool:
    if status != wanted["status"]:
        return False
    for key, value in wanted.get("error", {}).items():
        found = body["error"].get(key)
        if key == "message":
            if not found:
                return False
        elif key == "param":
            if not str(found).startswith(value):
                return False
        elif found != value:
            return False
    return True


@pytest.mark.parametrize("case", [c for c in CASES if "needs" not in c], ids=lambda c: c["id"])
def test_known_cases(served: Served, text: str, case: dict[str, Any]) -> None:
    raw = case.get("raw_body")
    body = None if raw is not None else filled(case["body"])
    data = raw.encode() if raw is not None else None
    status, _, found = served.call(case["path"], body, headers=case["headers"], raw=data, method=case["method"])
    wanted = [case["expected"]] + [a for a in case.get("also_acceptable", []) if a["status"] != 200]
    assert any(agrees(w, status, found) for w in wanted), (status, found)
    assert found["message"] == found["error"]["message"] and found["object"] == "error", "SGLang's flat body as well"
    assert served.ask("/v1/completions", GOOD)["choices"][0]["text"] == text


def test_a_refused_stream_has_a_status(served: Served) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_tokens": 10**6}
    status, _, found = served.call("/v1/chat/completions", body)
    assert status == 400 and found["error"]["param"] == "max_tokens"


CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
FIELDS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": ""}, "prompt"),
    ("/v1/completions", {"prompt": []}, "prompt"),
    ("/v1/completions", {"prompt": [5000]}, "prompt"),
    ("/v1/completions", {"prompt": [[1], "a"], "n": 200}, "n"),
    ("/v1/completions", {"prompt": [1, "a"]}, "prompt"),
    ("/v1/completions", {"prompt": None}, "prompt"),
    ("/v1/completions", {**GOOD, "temperature": -1}, "temperature"),
    ("/v1/completions", {**GOOD, "temperature": "hot"}, "temperature"),
    ("/v1/completions", {**GOOD, "temperature": True}, "temperature"),
    ("/v1/completions", {**GOOD, "top_p": 0}, "top_p"),
    ("/v1/completions", {**GOOD, "top_k": -7}, "top_k"),
    ("/v1/completions", {**GOOD, "logprobs": 21}, "logprobs"),
    ("/v1/completions", {**GOOD, "best_of": 3}, "best_of"),
    ("/v1/completions", {**GOOD, "suffix": "x"}, "suffix"),
    ("/v1/completions", {**GOOD, "max_token": 3}, "max_token"),
    ("/v1/completions", {**GOOD, "max_completion_tokens": 3}, "max_tokens"),
    ("/v1/completions", {**GOOD, "logit_bias": {"x": 1}}, "logit_bias"),
    ("/v1/completions", {**GOOD, "logit_bias": {"99999": 1}}, "logit_bias"),
    ("/v1/completions", {**GOOD, "stop": ["a"] * 40}, "stop"),
    ("/v1/completions", {**GOOD, "stop_token_ids": ["a"]}, "stop_token_ids"),
    ("/v1/chat/completions", {**CHAT, "tools": [{"type": "function"}]}, "tools[0].function.name"),
    ("/v1/chat/completions", {**CHAT, "tools": "x"}, "tools"),
    *(
        (
            "/v1/chat/completions",
            {**CHAT, "tools": [{"type": "function", "function": given}]},
            f"tools[0].function.{at}",
        )
        for given, at in (
            ({"name": "my tool"}, "name"),
            ({"name": "</tool_call>"}, "name"),
            ({"name": "a", "parameters": {"properties": ["a"]}}, "parameters.properties"),
            ({"name": "a", "parameters": {"properties": {}, "required": 5}}, "parameters.required"),
        )
    ),
    ("/generate", {"text": "a", "sampling_params": {"no_stop_trim": True}}, "sampling_params.no_stop_trim"),
    ("/tokenize", {"messages": ["x"]}, "messages[0]"),
    ("/tokenize", {"messages": []}, "messages"),
    ("/v1/chat/completions", {**CHAT, "tool_choice": "required"}, "tool_choice"),
    ("/v1/chat/completions", {**CHAT, "tool_choice": "sometimes"}, "tool_choice"),
    ("/v1/chat/completions", {**CHAT, "modalities": ["audio"]}, "modalities"),
    ("/v1/chat/completions", {**CHAT, "stream": "yes"}, "stream"),
    ("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ("/v1/chat/completions", {**CHAT, "messages": ["Hi"]}, "messages"),
    ("/v1/chat/completions", {**CHAT, "stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    ("/generate", {}, "text"),
    ("/generate", {"text": "a", "input_ids": [1]}, "text"),
    ("/generate", {"text": "a", "sampling_params": {"temprature": 1}}, "sampling_params.temprature"),
    ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
    ("/generate", {"text": ["a", 3]}, "text"),
    ("/generate", {"input_ids": ["a"]}, "input_ids"),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": [1]}, "prompt"),
    ("/detokenize", {"tokens": [-1]}, "tokens"),
    ("/detokenize", {"tokens": "a"}, "tokens"),
    ("/abort_request", {}, "rid"),
    ("/generate", {"text": "a", "return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num"),
    ("/generate", {"text": "a", "return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
    ("/generate", {"input_ids": [[5]] * 1025}, "text"),
    ("/generate", {"text": ["a", "b"], "rid": ["c", "c"]}, "rid"),
    ("/generate", {"text": ["a", "b"], "rid": ["c", 5]}, "rid"),
    ("/v1/completions", {**GOOD, "logprobs": 21, "echo": True}, "logprobs"),
    ("/v1/completions", {**GOOD, "logit_bias": {" 1": 5}}, "logit_bias"),
    ("/generate", {"text": "a", "rid": "a\r\nSet-Cookie: b"}, "rid"),
    ("/v1/completions", {**GOOD, "rid": "x" * 300}, "rid"),
]


@pytest.mark.parametrize(("path", "body", "param"), FIELDS, ids=lambda value: json.dumps(value)[:60])
def test_a_field_at_fault_is_named(served: Served, path: str, body: dict[str, Any], param: str) -> None:
    status, _, found = served.call(path, body)
    assert status == 400 and str(found["error"]["param"]).startswith(param), found
    assert found["error"]["type"] == "invalid_request_error" and found["error"]["message"]


@pytest.mark.parametrize(
    "raw",
    [b"", b"[]", b"null", b"\xff", b'{"a": NaN}', b"[" * 100_000, b'{"a":' * 5000 + b"1" + b"}" * 5000, b'"x"',
     b'{"prompt": "\\ud800", "max_tokens": 2}', b'{"prompt": "a", "max_tokens": 1e400}',
     b'{"prompt": "a", "max_tokens": 99999999999999999999999}', b'{"prompt": "a", "seed": 9e99}'],
    ids=lambda raw: repr(raw[:24]),
)  # fmt: skip
def test_bodies_that_are_none(served: Served, text: str, raw: bytes) -> None:
    status, _, found = served.call("/v1/completions", raw=raw, method="POST")
    assert status == 400 and found["error"]["message"], found
    assert served.ask("/v1/completions", GOOD)["choices"][0]["text"] == text


def test_a_body_that_cannot_be_unpacked(served: Served, text: str) -> None:
    headers = {"Content-Encoding": "gzip"}
    status, _, found = served.call("/v1/completions", raw=b"abcde", headers=headers, method="POST")
    assert status == 400 and "cannot be read" in found["error"]["message"]
    packed = gzip.compress(json.dumps(GOOD).encode())
    assert served.call("/v1/completions", raw=packed, headers=headers)[2]["choices"][0]["text"] == text
    status, _, found = served.call("/v1/completions", raw=gzip.compress(b" " * (64 << 20)), headers=headers)
    assert status == 413


def test_methods_and_paths(served: Served) -> None:
    status, headers, found = served.call("/v1/completions")
    assert status == 405 and headers["Allow"] == "POST" and found["error"]["message"]
    assert served.call("/nothing")[0] == 404
    assert served.call("/v1/models/other")[0] == 404 and served.ask("/v1/models/pebble", None)["id"] == "pebble"


def test_a_key_and_a_small_house() -> None:
    with Served("--api-key", "secret", "--max-body", "2000") as guarded:
        for given in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "secret"},
            {"Authorization": "Bearer ÿþ"},
        ):
            status, headers, found = guarded.call("/v1/models", headers=given)
            assert status == 401 and found["error"]["code"] == "invalid_api_key"
            assert headers["WWW-Authenticate"] == "Bearer"
        key = {"Authorization": "Bearer secret"}
        assert guarded.call("/v1/models", headers={"Authorization": "bearer secret"})[0] == 200
        assert guarded.call("/v1/models", headers=key)[0] == 200 and guarded.call("/health")[0] == 200
        status, _, found = guarded.call("/v1/completions", {"prompt": "a" * 3000}, headers=key)
        assert status == 413 and "2000" in found["error"]["message"]
        info = guarded.call("/server_info", headers=key)[2]
        assert "secret" not in json.dumps(info)
    assert "secret" not in "".join(guarded.said)


def test_pages_of_other_origins(served: Served) -> None:
    status, _, found = served.call("/flush_cache", {}, headers={"Origin": "http://elsewhere.example"})
    assert status == 403 and found["error"]["code"] == "foreign_origin"
    assert served.call("/flush_cache", {}, headers={"Origin": served.url})[0] == 200


def test_what_cannot_be_served_ends_at_once(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no directory|no model"):
        Served(model=str(tmp_path / "nothing"))
    with pytest.raises(AssertionError, match="unknown argument"):
        Served("--prot", "1")
    with Served() as taken, pytest.raises(AssertionError, match="cannot listen on"):
        Served("--port", taken.url.rsplit(":", 1)[1])
    with pytest.raises(AssertionError, match="--tp-size 4: only 1 is possible"):
        Served("--tp-size", "4")
