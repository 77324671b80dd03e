"""Tokenizer, detokeniser and chat templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from soliton.checkpoint import Tokenizer, render
from soliton.errors import CheckpointError, RequestError, UnsupportedError

SHARED = Path(__file__).parents[2].parent / "shared" / "conformance" / "protocol"
SPECIAL, PLAIN = "<|role_end|>", "<a b>"


@pytest.fixture(scope="session")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE of 300 tokens with merges across bytes of one character, and added tokens of both kinds."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(["naïve 潮の満ち引き 🏴‍☠️ über die See " * 20, "the tide the tide " * 20], trainer)
    made.add_special_tokens([SPECIAL])
    made.add_tokens([PLAIN])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


@pytest.fixture(scope="session")
def tokenizer(file: Path) -> Tokenizer:
    return Tokenizer(file)


def test_round_trip(tokenizer: Tokenizer, file: Path) -> None:
    text = "naïve 潮 🏴‍☠️ <a b> über"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert Tokenizer(file.parent).encode(text) == tokenizer.encode(text)
    end = tokenizer.id_of(SPECIAL)
    assert end is not None and tokenizer.encode(f"a{SPECIAL}")[-1] == end and tokenizer.id_of("no such") is None
    assert tokenizer.decode([end]) == "" and tokenizer.decode([end], skip_special=False) == SPECIAL
    assert tokenizer.special_ids == {end} and tokenizer.vocab_size == end + 2
    assert tokenizer.token_bytes(tokenizer.vocab_size + 5) == b""


@given(data=st.data(), skip=st.booleans())
def test_stream_equals_decode_for_any_ids_and_cuts(tokenizer: Tokenizer, data: st.DataObject, skip: bool) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=30))
    stream, pieces, i = tokenizer.stream(skip), [], 0
    while i < len(ids):
        step = data.draw(st.integers(1, 4))
        pieces.append(stream.push(ids[i : i + step]))
        i += step
    assert "".join(pieces) + stream.flush() == tokenizer.decode(ids, skip)


@given(text=st.text(max_size=30))
def test_stream_never_shows_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    stream, shown = tokenizer.stream(skip_special=False), ""
    for token in tokenizer.encode(text):
        shown += stream.push([token])
        assert text.startswith(shown)
    assert stream.flush() == "" and shown == text


def test_incomplete_end_is_replaced_at_flush(tokenizer: Tokenizer) -> None:
    wave = [tokenizer.id_of(c) for c in "ðŁ"]  # the first two of four bytes of an emoji
    assert None not in wave
    stream = tokenizer.stream()
    assert stream.push([i for i in wave if i is not None]) == "" and stream.flush() == "\ufffd"
    assert stream.push(tokenizer.encode("fresh")) == "fresh"


def test_a_split_character_comes_with_its_last_token(tokenizer: Tokenizer) -> None:
    stream = tokenizer.stream()
    ids = tokenizer.encode("a\u20acb")  # three bytes without a merge
    assert [stream.push([token]) for token in ids] == ["a", "", "", "\u20ac", "b"]


def test_tokenizer_faults(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a readable"):
        Tokenizer(tmp_path)
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UnsupportedError, match="ByteLevel"):
        Tokenizer(tmp_path)


def test_text_that_is_no_unicode(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError):
        tokenizer.encode("\ud800")


def _cases() -> list[Any]:
    file = SHARED / "chat_template.jsonl"
    if not file.exists():
        return [pytest.param(None, id="conformance-data-absent")]
    return [pytest.param(c, id=c["id"]) for c in map(json.loads, file.read_text(encoding="utf-8").splitlines())]


@pytest.mark.parametrize("case", _cases())
def test_conformance_templates(case: dict[str, Any] | None) -> None:
    if case is None:
        pytest.skip(f"conformance data absent at {SHARED}: chat templates are not checked")
    template = (SHARED / "chat_template.jinja").read_text(encoding="utf-8")
    prompt = render(
        template,
        case["messages"],
        tools=case.get("tools"),
        add_generation_prompt=case["add_generation_prompt"],
        special_tokens={},
        **case["chat_template_kwargs"],
    )
    assert prompt == case.get("prompt", case.get("prompt_of_test_template"))


def test_surroundings_of_a_template() -> None:
    messages = [{"role": "user", "content": "ü<"}]
    assert render("{{ bos_token }}{{ x }}", messages, special_tokens={"bos_token": "<s>"}, x=1) == "<s>1"
    assert render("{{ messages | tojson }}", messages) == '[{"role": "user", "content": "ü<"}]'
    assert render("{{ {'b': 1, 'a': 2} | tojson(indent=2) }}", messages) == '{\n  "b": 1,\n  "a": 2\n}'
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", messages) == "01"
    assert render("a{% generation %}b{{ 1 }}{% endgeneration %}c", messages) == "ab1c"
    assert len(render("{{ strftime_now('%Y') }}", messages)) == 4
    assert render("  {% if true %}\nx\n  {% endif %}\n", messages) == "x\n"
    assert render("{{ tools is none }}", messages, tools=[]) == "True"
    assert render("{{ documents[0] }}{{ add_generation_prompt }}", messages, documents=["d"]) == "dTrue"


def test_arguments_reach_the_template_as_objects() -> None:
    template = "{% for k, v in messages[0].tool_calls[0].function.arguments.items() %}{{ k }}={{ v }};{% endfor %}"

    def message(arguments: str) -> list[dict[str, Any]]:
        return [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]

    given = message('{"a": 1, "b": "x"}')
    assert render(template, given) == "a=1;b=x;"
    assert given == message('{"a": 1, "b": "x"}')  # the caller's messages are left alone
    assert render(template, message("")) == ""
    for bad in ("{", "[1]"):
        with pytest.raises(RequestError, match=r"messages\[0\]\.tool_calls\[0\]") as caught:
            render(template, message(bad))
        assert caught.value.param == "messages"


def test_template_faults() -> None:
    with pytest.raises(RequestError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}", [])
    with pytest.raises(RequestError, match="cannot render|refuses"):
        render("{{ messages[0].content + 1 }}", [{"role": "user", "content": "x"}])
    with pytest.raises(RequestError, match="refuses|cannot"):
        render("{{ messages.append(1) }}", [{"role": "user"}])
    with pytest.raises(RequestError, match="unsafe"):
        render("{{ ''.__class__.__mro__ }}", [])
    with pytest.raises(CheckpointError, match="line 2"):
        render("a\n{% if %}", [])
    with pytest.raises(RequestError, match=r"messages\[0\]"):
        render("x", ["hi"])  # type: ignore[list-item]
