"""From the bodies of OpenAI's and SGLang's requests to prompts and sampling values. Nothing here waits or answers."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import RequestError
from ..sampling.params import MAX_TOP_LOGPROBS, SamplingParams
from .arguments import check_tool
from .body import Body

MAX_N = 128
MAX_PROMPTS = 1024
MAX_PROMPT = 2**31  # tokens: more than any prompt has
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed",
    "min_tokens", "ignore_eos", "stop_token_ids", "skip_special_tokens",
)  # fmt: skip
# mean nothing to a server of one stream, and cost nobody anything
HARMLESS = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "cache_salt", "priority",
    "parallel_tool_calls", "prediction", "verbosity", "spaces_between_special_tokens", "session_params",
    "bootstrap_host", "bootstrap_port", "bootstrap_room", "data_parallel_rank", "extra_key", "log_metrics",
    "background", "conversation_id", "require_reasoning",
)  # fmt: skip
NOT_HERE = {
    "suffix": "the models do not fill a gap",
    "audio": "the models write text only",
    "functions": "it is the old name of tools; send tools",
    "function_call": "it is the old name of tool_choice; send tool_choice",
    "web_search_options": "this server searches nothing",
    "stop_regex": "send stop texts, or a grammar as regex",
    "structural_tag": "send json_schema, regex or ebnf",
    "input_embeds": "send text or token ids",
    "image_data": "the models read text only",
    "video_data": "the models read text only",
    "audio_data": "the models read text only",
    "logit_processors": "they are programs",
    "use_beam_search": "one stream has one beam",
    "return_prompt_token_ids_logprob": "send logprobs",
}
NEUTRAL = (
    "custom_logit_processor", "no_stop_trim", "return_token_ids", "lora_path", "lora_id", "return_hidden_states",
    "return_routed_experts", "custom_params",
)  # fmt: skip


@dataclass
class Ask:
    """What one HTTP request wants. prompts: texts, token ids or one list of messages; params: for each answer but its
    seed (see ``seeded``); chat: variables of the template."""

    prompts: list[Any]
    params: SamplingParams
    n: int = 1
    stream: bool = False
    rid: str | None = None
    batch: bool = False  # /generate was sent a list of prompts and answers with a list, be it of one
    rids: tuple[str, ...] = ()  # of several prompts, each its own
    usage: bool = False  # a stream's last chunk tells it
    usage_always: bool = False  # every chunk does
    chat: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_choice: str = "none"
    separate_reasoning: bool = True
    echo: bool = False
    scores: bool = False  # prompt_logprobs are told
    meta: bool = False
    logprob_start: int = 0  # the first prompt token whose log-probability /generate tells
    grammar_in_answer: bool = False  # the grammar binds the answer, not the reasoning before it

    def seeded(self, place: int) -> SamplingParams:
        """Of answer ``place``: a given seed counts up, so that answers differ and can be had again."""
        if not place or self.params.seed is None:
            return self.params
        return dataclasses.replace(self.params, seed=(self.params.seed + place) % 2**63)


def _common(body: Body) -> dict[str, Any]:
    """The sampling fields that all routes share, for SamplingParams.from_dict."""
    values: dict[str, Any] = {}
    for name in SAMPLING:
        kinds = {"seed": (int,), "min_tokens": (int,), "top_k": (int,), "stop_token_ids": (list,)}.get(name, (float,))
        kinds = (bool,) if name in ("ignore_eos", "skip_special_tokens") else kinds
        values[name] = body.take(name, *kinds)
    if values["top_k"] == -1:
        values["top_k"] = 0
    ids = values["stop_token_ids"]
    if ids is not None and not all(type(token) is int for token in ids):
        raise RequestError(f"{body.name('stop_token_ids')} holds something that is no integer", param="stop_token_ids")
    values["stop"] = body.texts("stop")
    if values["stop"] == [""]:
        values["stop"] = None
    sampling_seed = body.take("sampling_seed", int)  # SGLang's name
    values["seed"] = values["seed"] if sampling_seed is None else sampling_seed
    for name in ("regex", "ebnf"):
        values[name] = body.take(name, str)
    schema = body.take("json_schema", str, dict)
    values["json_schema"] = json.dumps(schema) if isinstance(schema, dict) else schema
    bias = body.take("logit_bias", dict)
    if bias is not None and not all(re.fullmatch(r"0|[1-9][0-9]{0,17}", token) for token in bias):
        raise RequestError("logit_bias has a key that is no token id", param="logit_bias")
    values["logit_bias"] = bias
    return values


def _params(values: dict[str, Any]) -> SamplingParams:
    given = {key: value for key, value in values.items() if value is not None}
    return SamplingParams.from_dict(given)


def _count(body: Body, name: str, least: int, hint: str = "") -> int | None:
    value = body.take(name, int)
    if value is not None and value < least:
        raise RequestError(f"{name} is {value}; at least {least} is needed{hint}", param=body.name(name))
    return int(value) if value is not None else None


def _n(body: Body) -> int:
    n = body.take("n", int, default=1)
    if not 1 <= n <= MAX_N:
        raise RequestError(f"n is {n}; from 1 to {MAX_N} answers can be asked for", param="n")
    return int(n)


def _stream(body: Body, ask: Ask) -> None:
    ask.stream = body.take("stream", bool, default=False)
    options = body.body("stream_options")
    if options is None:
        return
    if not ask.stream:
        raise RequestError("stream_options go with stream = true only; leave them out", param="stream_options")
    ask.usage = options.take("include_usage", bool, default=False)
    ask.usage_always = options.take("continuous_usage_stats", bool, default=False)
    options.ignore(["include_obfuscation"])
    options.end()


def _finish(body: Body) -> None:
    body.refuse({name: NOT_HERE[name] for name in NOT_HERE})
    body.refuse(dict.fromkeys(NEUTRAL, "this server has no such thing"))
    body.ignore(HARMLESS)
    body.end()


def _response_format(body: Body, values: dict[str, Any]) -> None:
    form = body.body("response_format")
    if form is None:
        return
    kind = form.one_of("type", ("text", "json_object", "json_schema"))
    if kind is None:
        raise RequestError("response_format has no type", param="response_format")
    given = [name for name in ("json_schema", "regex", "ebnf") if values.get(name) is not None]
    if given and kind != "text":
        raise RequestError(f"response_format and {given[0]} both name a grammar; give one", param="response_format")
    if kind == "json_object":
        values["json_object"] = True
    if kind == "json_schema":
        outer = form.body("json_schema")
        if outer is None:
            raise RequestError("response_format.json_schema is missing", param="response_format.json_schema")
        schema = outer.take("schema", dict, default={})
        outer.ignore(["name", "description", "strict"])
        outer.end()
        values["json_schema"] = json.dumps(schema)
    form.ignore(["json_schema"])
    form.end()


def completion(fields: Mapping[str, Any]) -> tuple[str | None, Ask]:
    """(the model asked for, the rest) of a body for /v1/completions."""
    body = Body(fields)
    model, prompt = body.take("model", str), body.take("prompt", str, list)
    if prompt is None:
        raise RequestError("prompt is missing", param="prompt")
    values = _common(body)
    echo = body.take("echo", bool, default=False)
    least, hint = (0, "") if echo else (1, ", or 0 with echo = true")
    limit = _max_tokens(body, ("max_tokens", "max_completion_tokens"), least, hint)
    values["max_tokens"] = 16 if limit is None else limit
    logprobs = body.take("logprobs", int, bool)
    values["logprobs"] = None if logprobs is False else int(logprobs) if logprobs is not None else None
    _response_format(body, values)
    n = _n(body)
    if body.take("best_of", int, default=n) != n:
        raise RequestError("best_of differs from n; every answer that is made is returned", param="best_of")
    ask = Ask(prompts=_prompts(prompt), params=SamplingParams(), n=n)
    ask.echo = echo
    if echo and values["logprobs"] is not None:
        values["prompt_logprobs"] = values["logprobs"]
    elif limit == 0:
        values["prompt_logprobs"] = 0  # the engine reads a prompt without an answer to score it only
    scored = body.take("prompt_logprobs", int)
    if scored is not None and echo and values["logprobs"] not in (None, scored):
        raise RequestError(
            f"echo with logprobs = {values['logprobs']} scores the prompt, and prompt_logprobs is {scored}; give one",
            param="prompt_logprobs",
        )
    ask.scores = scored is not None
    values["prompt_logprobs"] = scored if scored is not None else values.get("prompt_logprobs")
    _stream(body, ask)
    ask.rid, ask.meta = body.take("rid", str), body.take("return_meta_info", bool, default=False)
    _finish(body)
    ask.params = _params(values)
    return model, ask


def _max_tokens(body: Body, names: tuple[str, ...], least: int = 1, hint: str = "") -> int | None:
    found = {name: _count(body, name, least, hint) for name in names}
    given = {name: value for name, value in found.items() if value is not None}
    if len(set(given.values())) > 1:
        raise RequestError(f"{' and '.join(given)} differ; give one of them", param=body.name(next(iter(given))))
    return next(iter(given.values()), None)


def _prompts(prompt: str | list[Any]) -> list[Any]:
    """One text, one list of ids, or a list of either."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("prompt is an empty list", param="prompt")
    if all(type(item) is int for item in prompt):
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise RequestError(f"prompt lists {len(prompt)} prompts; at most {MAX_PROMPTS} go at once", param="prompt")
    for item in prompt:
        ids = isinstance(item, list) and all(type(token) is int for token in item)
        if not isinstance(item, str) and not ids:
            raise RequestError("prompt holds something that is neither a text nor a list of token ids", param="prompt")
    return prompt


def chat(fields: Mapping[str, Any]) -> tuple[str | None, Ask]:
    """(the model asked for, the rest) of a body for /v1/chat/completions."""
    body = Body(fields)
    model, messages = body.take("model", str), body.take("messages", list)
    if not messages:
        raise RequestError("messages is missing or empty; send at least one", param="messages")
    for place, message in enumerate(messages):
        check_message(place, message)
    values = _common(body)
    values["max_tokens"] = _max_tokens(body, ("max_completion_tokens", "max_tokens"))
    logprobs, top = body.take("logprobs", bool, default=False), body.take("top_logprobs", int)
    if top is not None and not logprobs:
        raise RequestError("top_logprobs needs logprobs = true", param="top_logprobs")
    values["logprobs"], values["top_logprobs"] = (True, top) if logprobs else (None, None)
    _response_format(body, values)
    ask = Ask(prompts=[messages], params=SamplingParams(), n=_n(body))
    _tools(body, ask)
    _thinking(body, ask)
    _stream(body, ask)
    ask.separate_reasoning = body.take("separate_reasoning", bool, default=True)
    if not body.take("stream_reasoning", bool, default=True):
        raise RequestError("stream_reasoning = false is not supported; reasoning is streamed", param="stream_reasoning")
    ask.rid, ask.meta = body.take("rid", str), body.take("return_meta_info", bool, default=False)
    modalities = body.texts("modalities")
    if modalities is not None and modalities != ["text"]:
        raise RequestError("modalities may hold text only", param="modalities")
    _finish(body)
    ask.grammar_in_answer = any(values.get(k) for k in ("json_schema", "json_object", "regex", "ebnf"))
    ask.params = _params(values)
    return model, ask


def check_message(place: int, message: Any) -> None:
    """RequestError unless it is an object with a role that is known, and calls that are objects."""
    where = f"messages[{place}]"
    if not isinstance(message, dict):
        raise RequestError(f"{where} is no object", param=where)
    role = message.get("role")
    if role not in ROLES:
        said = "has no role" if role is None else f"has the role {role!r}"
        raise RequestError(f"{where} {said}; roles are {', '.join(ROLES)}", param=f"{where}.role")
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise RequestError(f"{where}.tool_calls is no list of objects", param=f"{where}.tool_calls")


def _tools(body: Body, ask: Ask) -> None:
    tools = body.take("tools", list, default=[])
    for place, tool in enumerate(tools):
        check_tool(place, tool)
    choice = body.take("tool_choice", str, dict)
    names = [tool["function"]["name"] for tool in tools]
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if name not in names:
            raise RequestError(f"tool_choice names {name!r}, which is none of the tools {names}", param="tool_choice")
        choice = f"={name}"
    elif choice not in (None, "auto", "none", "required"):
        raise RequestError(
            f"tool_choice is {choice!r}; it may be auto, none, required or a function", param="tool_choice"
        )
    elif choice == "required" and not tools:
        raise RequestError("tool_choice is required, but no tools are offered", param="tool_choice")
    ask.tools, ask.tool_choice = tools, (choice or "auto") if tools else "none"
    if tools and ask.tool_choice != "none":
        ask.chat["tools"] = tools


def _thinking(body: Body, ask: Ask) -> None:
    effort = body.take("reasoning_effort", str, float)
    extra = body.take("chat_template_kwargs", dict, default={})
    if effort is not None:
        ask.chat["reasoning_effort"] = effort
        ask.chat["enable_thinking"] = effort not in ("none", 0)
    for name, value in extra.items():
        if name in ("messages", "tools", "template", "special_tokens", "add_generation_prompt"):
            raise RequestError(f"chat_template_kwargs.{name} is not for a request to set", param="chat_template_kwargs")
        ask.chat[name] = value
    last_turn = body.take("continue_final_message", bool, default=False)
    opened = body.take("add_generation_prompt", bool, default=True)
    if last_turn:
        raise RequestError(
            "continue_final_message is not supported; send the text to /v1/completions", param="continue_final_message"
        )
    if not opened:
        ask.chat["add_generation_prompt"] = False


def native(fields: Mapping[str, Any]) -> Ask:
    """A body for SGLang's /generate."""
    body = Body(fields)
    text, ids = body.take("text", str, list), body.take("input_ids", list)
    if (text is None) == (ids is None):
        raise RequestError("give either text or input_ids", param="text")
    prompts: list[Any]
    nested = bool(ids) and all(isinstance(item, list) for item in ids)
    if text is not None:
        prompts = [text] if isinstance(text, str) else text
        if not prompts or not all(isinstance(item, str) for item in prompts):
            raise RequestError("text is no text and no list of texts", param="text")
    else:
        prompts = ids if nested else [ids]
        for item in prompts:
            if not all(type(token) is int for token in item):
                raise RequestError("input_ids holds something that is no integer", param="input_ids")
    if len(prompts) > MAX_PROMPTS:
        raise RequestError(f"{len(prompts)} prompts are given; at most {MAX_PROMPTS} go at once", param="text")
    inner = body.body("sampling_params") or Body({}, "sampling_params")
    values = _common(inner)
    limit = _max_tokens(inner, ("max_new_tokens", "max_tokens"), 0)
    values["max_tokens"] = 128 if limit is None else limit
    least = inner.take("min_new_tokens", int)
    values["min_tokens"] = least if least is not None else values["min_tokens"]
    ask = Ask(prompts=prompts, params=SamplingParams(), n=_n(inner), batch=nested or isinstance(text, list))
    _finish(inner)
    ask.stream = body.take("stream", bool, default=False)
    wants = body.take("return_logprob", bool, default=False)
    start, top = body.take("logprob_start_len", int, default=-1), body.take("top_logprobs_num", int, default=0)
    for name, value, least, most in (
        ("logprob_start_len", start, -1, MAX_PROMPT), ("top_logprobs_num", top, 0, MAX_TOP_LOGPROBS),
    ):  # fmt: skip
        if not least <= value <= most:
            raise RequestError(f"{name} is {value}; it must be from {least} to {most}", param=name)
    if wants:
        values["logprobs"] = top
        if start >= 0:
            values["prompt_logprobs"] = top
            ask.logprob_start = start
    body.ignore(["return_text_in_logprobs"])
    if body.take("token_ids_logprob", list):
        raise RequestError("token_ids_logprob is not supported; send top_logprobs_num", param="token_ids_logprob")
    rid = body.take("rid", str, list)
    if isinstance(rid, list):
        fix = "give one text, or a list with one of its own for each prompt"
        if len(rid) != len(prompts):
            raise RequestError(f"rid lists {len(rid)} ids for {len(prompts)} prompts; {fix}", param="rid")
        if not all(type(name) is str for name in rid) or len(set(rid)) < len(rid):
            raise RequestError(f"rid lists something that is no text, or one text twice; {fix}", param="rid")
        ask.rids = tuple(rid)
    else:
        ask.rid = rid
    ask.usage_always = True
    _finish(body)
    if values["max_tokens"] == 0 and values.get("prompt_logprobs") is None:
        values["prompt_logprobs"], ask.logprob_start = 0, MAX_PROMPT  # read, and told nothing of
    ask.params = _params(values)
    return ask
