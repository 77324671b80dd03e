"""The commands as a user runs them: what goes to stdout, what to stderr, exit codes, terminals, pipes and Ctrl-C."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from soliton.cli import main
from soliton.commands import common
from soliton.measure import doctor
from soliton.measure.golden import Golden

# Settings of the tester's own shell must not reach the commands.
CLEAN = {key: value for key, value in os.environ.items() if not key.startswith("SOLITON_")}
ESCAPE = "\x1b["
CYAN, GREEN = ESCAPE + "36m", ESCAPE + "32m"


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SOLITON_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def micro(data_dir: Path) -> str:
    return str(data_dir / "ling-micro")


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "soliton", *words]


class TestGenerate:
    def test_ids_of_the_reference(self, micro: str, capsys: pytest.CaptureFixture[str]) -> None:
        golden = Golden.read(Path(micro))
        ids = ",".join(str(token) for token in golden.ids("prompt.3.ids"))
        wanted = golden.ids("prompt.3.cont_ids")[:20]
        assert main(["generate", micro, "--ids", ids, "--temperature", "0", "--max-tokens", "20"]) == 0
        said = capsys.readouterr()
        assert said.out == "".join(f"{token} " for token in wanted) + "\n"
        for part in ("TTFT", "TPOT", "tokens/s", "accept length", "run-ahead 0", "cached 0 of 17", "length"):
            assert part in said.err
        assert said.err.count("\n") == 1

    def test_json(self, micro: str, capsys: pytest.CaptureFixture[str]) -> None:
        words = ["generate", micro, "--ids", "5,6,7", "--temperature", "0", "--max-tokens", "6", "--json"]
        assert main([*words, "--logprobs", "2", "--prompt-logprobs", "0"]) == 0
        said = capsys.readouterr()
        document = json.loads(said.out)
        assert said.err == ""
        assert len(document["ids"]) == 6 == len(document["logprobs"]) and document["finish_reason"] == "length"
        first = document["logprobs"][0]
        assert first["token_id"] == document["ids"][0] == first["top"][0][0] and len(first["top"]) == 2
        assert document["prompt_logprobs"][0] is None and len(document["prompt_logprobs"]) == 3
        stats = document["stats"]
        assert stats["completion_tokens"] == 6 == sum(stats["accept_lengths"]) and stats["prompt_tokens"] == 3
        assert main(words) == 0
        assert json.loads(capsys.readouterr().out)["logprobs"] is None

    @pytest.mark.parametrize(
        ("words", "says"),
        [
            (["hello"], "needs a tokenizer"),
            (["--ids", "1,320"], "from 0 to 319"),
            (["--ids", "1", "--max-context", "10", "--max-tokens", "50"], "room for 9"),
            (["--ids", "1", "--max-context", "99999999"], "max_context"),
            (["--ids", "1", "--memory-budget", "1000"], "budget"),
        ],
    )
    def test_refused_by_the_model(
        self, words: list[str], says: str, micro: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["generate", micro, *words]) == 2
        said = capsys.readouterr()
        assert said.out == "" and says in said.err and said.err.count("\n") == 1

    def test_text_from_each_place(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        prompt = "def add(a, b):\n"
        file, messages = tmp_path / "prompt.txt", tmp_path / "messages.json"
        file.write_text(prompt)
        messages.write_text(json.dumps([{"role": "user", "content": "hi"}]))
        common_words = ["--temperature", "0", "--max-tokens", "4", "--json"]
        answers = []
        for words in (["pebble", prompt], ["--prompt-file", str(file)], ["-"], ["pebble", "-"]):
            monkeypatch.setattr("sys.stdin", io.StringIO(prompt))
            assert main(["generate", *words, *common_words]) == 0
            answers.append(json.loads(capsys.readouterr().out)["ids"])
        assert answers[0] and answers.count(answers[0]) == 4
        assert main(["generate", "--messages", str(messages), *common_words]) == 0
        assert json.loads(capsys.readouterr().out)["stats"]["prompt_tokens"] > 5

    def test_demo(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["generate", "pebble", "--demo"]) == 0
        said = capsys.readouterr()
        assert said.out.startswith("import os\n") and "\n    os.remove(path)\n" in said.out and ESCAPE not in said.out
        last = said.out.splitlines()[-1]
        assert "accept length" in last and "tokens/s" in last
        assert said.err == ""

    def test_reader_gone(self, micro: str) -> None:
        words = command("generate", micro, "--ids", "1", "--ignore-eos", "--max-tokens", "400")
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=CLEAN) as run:
            assert run.stdout is not None and run.stderr is not None
            run.stdout.close()
            assert b"Traceback" not in run.stderr.read()
        assert run.returncode == 141

    @pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
    def test_output_that_cannot_be_written(self, micro: str) -> None:
        with open("/dev/full", "w") as full:
            words = command("generate", micro, "--ids", "1", "--max-tokens", "3")
            done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, env=CLEAN, text=True, timeout=120)
        assert done.returncode == 74
        assert done.stderr.strip().splitlines()[-1].startswith("soliton: the output cannot be written (No space left")
        assert "Traceback" not in done.stderr

    def test_ctrl_c(self) -> None:
        words = command("generate", "pebble", "x = 1\n", "--ignore-eos", "--max-tokens", "3000")
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=CLEAN) as run:
            assert run.stdout is not None and run.stderr is not None
            assert run.stdout.read(8)
            run.send_signal(signal.SIGINT)
            said = run.stderr.read().decode()
        assert run.returncode == 130
        assert "Traceback" not in said and "abort" in said


class TestChat:
    def talk(self, text: str, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        return main(["chat", "pebble", "--temperature", "0", "--max-tokens", "8", "--ignore-eos", *words])

    def cached(self, line: str) -> tuple[int, int]:
        found = line.split("cached ")[1].split(" · ")[0].split(" of ")
        return int(found[0]), int(found[1])

    def test_history_is_reused_until_reset(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert self.talk("hello\nand then?\n\n/reset\n/nothing\nhello\n/quit\nnot read\n", monkeypatch) == 0
        said = capsys.readouterr()
        assert said.out.count("\n") >= 3 and ESCAPE not in said.out
        first, second, unknown, again = said.err.splitlines()
        assert self.cached(first)[0] == 0
        assert self.cached(second)[0] > 0 and self.cached(second)[1] > self.cached(first)[1]
        assert "no command /nothing" in unknown
        assert self.cached(again)[1] == self.cached(first)[1]

    def test_system(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.talk("hello\n", monkeypatch) == 0
        assert self.talk("/system Be brief and kind.\nhello\n/reset\n/system\nhello\n", monkeypatch) == 0
        assert self.talk("hello\n", monkeypatch, "--system", "Be brief and kind.") == 0
        sizes = [self.cached(line)[1] for line in capsys.readouterr().err.splitlines()]
        assert sizes[1] > sizes[0] == sizes[2] and sizes[3] == sizes[1]

    def test_a_message_too_long_is_refused_and_forgotten(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert self.talk("word " * 300 + "\nhello\n", monkeypatch, "--max-context", "200") == 2
        refused, answered = capsys.readouterr().err.splitlines()
        assert refused.startswith("soliton: ") and "max_context" in refused
        assert self.cached(answered)[1] < 100

    def test_needs_text(self, micro: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["chat", micro]) == 2
        assert "has no tokenizer" in capsys.readouterr().err

    def test_ctrl_c_stops_the_answer_alone(self) -> None:
        words = command("chat", "pebble", "--ignore-eos", "--temperature", "0")
        pipe = subprocess.PIPE
        with subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, env=CLEAN) as run:
            assert run.stdin is not None and run.stdout is not None and run.stderr is not None
            run.stdin.write(b"hello\n")
            run.stdin.flush()
            assert run.stdout.read(8)
            run.send_signal(signal.SIGINT)
            status = run.stderr.readline().decode()
            run.stdin.write(b"/foo\n")
            run.stdin.close()
            rest = run.stderr.read().decode()
        assert status.rstrip().endswith("abort") and "no command /foo" in rest
        assert run.returncode == 0


class Terminal:
    """A command on a pseudo-terminal, for all of stdin, stdout and stderr."""

    def __init__(self, *words: str) -> None:
        self._own, other = pty.openpty()
        env = {**CLEAN, "TERM": "xterm-256color"}
        self._run = subprocess.Popen(command(*words), stdin=other, stdout=other, stderr=other, env=env)
        os.close(other)
        self.text = ""

    def type(self, text: str) -> None:
        os.write(self._own, text.encode())

    def until(self, text: str | None, seconds: float = 120) -> str:
        """Everything up to and with ``text``; None: to the end."""
        end = time.monotonic() + seconds
        while (text is None or text not in self.text) and time.monotonic() < end:
            if select.select([self._own], [], [], 1)[0]:
                try:
                    data = os.read(self._own, 65536)
                except OSError:  # how Linux says that the other side is closed
                    break
                if not data:
                    break
                self.text += data.decode(errors="replace")
        assert text is None or text in self.text, self.text
        return self.text

    def code(self) -> int:
        self.until(None)
        return self._run.wait(30)

    def close(self) -> None:
        if self._run.poll() is None:
            self._run.kill()
            self._run.wait()
        os.close(self._own)


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    opened: list[Terminal] = []
    yield opened
    for terminal in opened:
        terminal.close()


class TestTerminal:
    def test_generate_colours_blocks_in_turn_behind_a_bar_that_vanishes(
        self, micro: str, terminals: list[Terminal]
    ) -> None:
        run = Terminal("generate", micro, "--ids", "5,6,7", "--temperature", "0", "--max-tokens", "12")
        terminals.append(run)
        assert run.code() == 0
        assert "loading" in run.text and ESCAPE + "2K" in run.text
        after = run.text[run.text.rindex(ESCAPE + "2K") :]
        assert after.count(CYAN) >= 2 and after.count(GREEN) >= 1
        assert "loading" not in after and "TTFT" in after

    def test_chat(self, terminals: list[Terminal]) -> None:
        run = Terminal("chat", "pebble", "--temperature", "0", "--max-tokens", "24", "--ignore-eos")
        terminals.append(run)
        run.until("> ")
        run.type("hello\n")
        said = run.until("cached 0")
        assert CYAN in said and GREEN in said and "TPOT" in said and "accept length" in said
        run.text = ""
        run.type("more\n")
        assert "cached 0 of" not in run.until("cached ")
        run.type("/quit\n")
        assert run.code() == 0
        assert "Traceback" not in run.text

    def test_an_escape_character_of_the_models_is_a_picture(self) -> None:
        assert common.shown("a\x1b[31mb") == "a␛[31mb"


class TestDoctor:
    @pytest.fixture(autouse=True)
    def _small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(doctor, "PROBE_LIMIT", 300_000)

    def test_the_machine(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["doctor"]) == 0
        said = capsys.readouterr().out
        for part in ("processor", "cores", "memory", "GPUs", "torch", "triton", "soliton", "not probed, too large"):
            assert part in said

    def test_a_model_without_its_weights(self, micro: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["doctor", micro, "--json", "--run-ahead", "1"]) == 0
        report = json.loads(capsys.readouterr().out)
        settings = {row["key"]: row for row in report["model"]["settings"]}
        assert settings["speculation"]["value"] == "nextn" and "MTP layer" in settings["speculation"]["reason"]
        assert settings["run_ahead"] == {"key": "run_ahead", "value": 1, "reason": "as given"}
        assert settings["prefill_chunk"] == {"key": "prefill_chunk", "value": 512, "reason": "the default on a CPU"}
        assert settings["prefix_reuse"]["reason"] == "the default"
        variants = {row["op"]: row for row in report["model"]["variants"]}
        assert variants["moe"]["variant"] == "dense" and variants["moe"]["reason"]
        memory = report["model"]["memory"]
        assert memory["total"] == sum(value for name, value in memory.items() if name != "total")
        assert all(row["soliton"] is True for row in report["products"]) and report["problems"] == []
        assert main(["doctor", micro]) == 0
        said = capsys.readouterr().out
        assert all(f"  {key}  " in said for key in settings) and "kda.prefill" in said and "memory plan" in said

    def test_a_draft_that_comes_with_the_model(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["doctor", "pebble", "--device", "cpu", "--speculation", "dspark", "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)["model"]["settings"]
        assert {"key": "draft", "value": "dspark", "reason": "comes with the model"} in rows

    def test_shapes_are_those_of_the_loaded_model(self, micro: str) -> None:
        from soliton.checkpoint import open_checkpoint
        from soliton.config import EngineConfig, bind
        from soliton.runtime import load_runtime

        checkpoint = open_checkpoint(micro)
        runtime = load_runtime(bind(EngineConfig, flags={"model": micro}, env={}), checkpoint)
        shapes = set(doctor.product_shapes(runtime.config, checkpoint, merge=True))
        assert shapes == set(doctor._weights(runtime.weights)) and len(shapes) > 5

    def test_a_model_that_does_not_fit(self, capsys: pytest.CaptureFixture[str]) -> None:
        words = ["doctor", "synthetic:kimi-linear-48b", "--json", "--memory-budget", "1GiB"]
        assert main(words) == 1
        report = json.loads(capsys.readouterr().out)
        assert "budget" in report["problems"][0]
        assert report["model"]["memory"]["weights"] > 10**11
        assert any(row["torch"] is None for row in report["products"])

    def test_an_unsteady_product_is_a_problem(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(doctor, "_own", lambda x, w: x @ w + len(x))
        report = doctor.examine(None)
        assert [row["soliton"] for row in report["products"] if row["torch"] is not None].count(False) > 0
        assert "row count" in report["problems"][0]
