"""The routes as an OpenAPI document, for clients and for tests that try them all."""

from __future__ import annotations

from typing import Any

TEXT, WHOLE, NUMBER, YES = {"type": "string"}, {"type": "integer"}, {"type": "number"}, {"type": "boolean"}
IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
OBJECT: dict[str, Any] = {"type": "object"}
SAMPLING: dict[str, Any] = {
    "temperature": {**NUMBER, "minimum": 0}, "top_p": {**NUMBER, "exclusiveMinimum": 0, "maximum": 1},
    "top_k": {**WHOLE, "minimum": -1}, "min_p": {**NUMBER, "minimum": 0, "maximum": 1},
    "presence_penalty": {**NUMBER, "minimum": -2, "maximum": 2},
    "frequency_penalty": {**NUMBER, "minimum": -2, "maximum": 2},
    "repetition_penalty": {**NUMBER, "minimum": 0.001, "maximum": 2}, "seed": WHOLE,
    "min_tokens": {**WHOLE, "minimum": 0}, "ignore_eos": YES, "stop_token_ids": {"type": "array", "items": WHOLE},
    "skip_special_tokens": YES, "stop": {"oneOf": [TEXT, {"type": "array", "items": TEXT, "maxItems": 16}]},
    "regex": TEXT, "ebnf": TEXT, "json_schema": {"oneOf": [TEXT, OBJECT]},
    "logit_bias": {**OBJECT, "additionalProperties": NUMBER}, "n": {**WHOLE, "minimum": 1, "maximum": 128},
}  # fmt: skip
LIMIT = {**WHOLE, "minimum": 1}
STREAM: dict[str, Any] = {
    "stream": YES, "model": TEXT, "rid": TEXT, "return_meta_info": YES, "user": TEXT,
    "stream_options": {
        **OBJECT, "properties": {"include_usage": YES, "continuous_usage_stats": YES}, "additionalProperties": False,
    },
    "response_format": {
        **OBJECT, "required": ["type"],
        "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}, "json_schema": OBJECT},
    },
}  # fmt: skip
MESSAGE = {
    **OBJECT, "required": ["role", "content"],
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {"oneOf": [TEXT, {"type": "array", "items": {
            **OBJECT, "required": ["type", "text"], "properties": {"type": {"const": "text"}, "text": TEXT}}}]},
    },
}  # fmt: skip
TOOL = {
    **OBJECT, "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {
            **OBJECT, "required": ["name"], "properties": {"name": TEXT, "description": TEXT, "parameters": OBJECT},
        },
    },
}  # fmt: skip
BODIES: dict[str, tuple[str, list[str], dict[str, Any]]] = {  # path -> what it does, required fields, fields
    "/v1/completions": ("continue a text", ["prompt"], {
        "prompt": {"oneOf": [TEXT, IDS, {"type": "array", "items": TEXT, "minItems": 1}]},
        "max_tokens": {**WHOLE, "minimum": 0},  # 0 with echo only
        "logprobs": {**WHOLE, "minimum": 0, "maximum": 20}, "echo": YES, "best_of": LIMIT, **SAMPLING, **STREAM,
    }),
    "/v1/chat/completions": ("answer messages", ["messages"], {
        "messages": {"type": "array", "items": MESSAGE, "minItems": 1}, "max_tokens": LIMIT,
        "max_completion_tokens": LIMIT, "logprobs": YES, "top_logprobs": {**WHOLE, "minimum": 0, "maximum": 20},
        "tools": {"type": "array", "items": TOOL}, "tool_choice": {"oneOf": [TEXT, OBJECT]},
        "reasoning_effort": TEXT, "separate_reasoning": YES, "chat_template_kwargs": OBJECT, **SAMPLING, **STREAM,
    }),
    "/generate": ("answer as SGLang does", [], {
        "text": {"oneOf": [TEXT, {"type": "array", "items": TEXT, "minItems": 1}]}, "input_ids": IDS,
        "sampling_params": {**OBJECT, "properties": {**SAMPLING, "max_new_tokens": {**WHOLE, "minimum": 0}}},
        "stream": YES, "return_logprob": YES, "logprob_start_len": WHOLE, "top_logprobs_num": WHOLE,
        "rid": {"oneOf": [TEXT, {"type": "array", "items": TEXT, "minItems": 1}]},
    }),
    "/tokenize": ("ids of a text or of messages", [], {
        "prompt": {"oneOf": [TEXT, {"type": "array", "items": TEXT}]}, "add_special_tokens": YES,
        "messages": {"type": "array", "items": MESSAGE},
    }),
    "/detokenize": ("the text of ids", ["tokens"], {"tokens": IDS, "skip_special_tokens": YES}),
    "/abort_request": ("end a request by its rid, or all", [], {"rid": TEXT, "abort_all": YES}),
}  # fmt: skip
READS = {
    "/health": "200 when answers can be had, 503 while loading", "/health_generate": "the same, by one token",
    "/v1/models": "the one model", "/model_info": "the model's files", "/get_model_info": "as /model_info",
    "/server_info": "settings, and what was accepted since the start", "/get_server_info": "as /server_info",
    "/get_load": "requests in the house", "/metrics": "Prometheus' text format", "/flush_cache": "forget checkpoints",
}  # fmt: skip
CODES = {
    "200": "an answer; a stream is server-sent events that end with [DONE]", "400": "a field is at fault",
    "401": "the key is missing or wrong", "404": "no such model or path", "409": "aborted while waiting",
    "413": "the body is too large", "429": "the line is full", "503": "loading, ending, or without an engine",
    "504": "took longer than it may",
}  # fmt: skip


def openapi() -> dict[str, Any]:
    """The whole document, OpenAPI 3.1."""
    refused = {"application/json": {"schema": {"$ref": "#/components/schemas/Refusal"}}}
    answers: dict[str, Any] = {
        code: {"description": text} if code == "200" else {"description": text, "content": refused}
        for code, text in CODES.items()
    }
    paths: dict[str, Any] = {}
    for path, (summary, required, fields) in BODIES.items():
        schema = {**OBJECT, "required": required, "properties": fields}
        content = {"application/json": {"schema": schema}}
        paths[path] = {
            "post": {"summary": summary, "requestBody": {"required": True, "content": content}, "responses": answers}
        }
    for path, summary in READS.items():
        paths[path] = {"get": {"summary": summary, "responses": answers}}
    inner = {"message": TEXT, "type": TEXT, "param": {"type": ["string", "null"]}, "code": {"type": ["string", "null"]}}
    error = {**OBJECT, "required": list(inner), "properties": inner}
    refusal = {**OBJECT, "required": ["error"], "properties": {"error": error, "object": {"const": "error"}, **inner}}
    bearer = {"type": "http", "scheme": "bearer"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Soliton", "version": "1", "description": "One model, one stream at a time."},
        "paths": paths,
        "components": {"schemas": {"Refusal": refusal}, "securitySchemes": {"key": bearer}},
    }
