"""The `vllm` command and its subcommands, with a stand-in for the engine."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from typing import Any

import pytest

import vllm
from vllm.entrypoints.cli import collect_env, demo, main
from vllm.exceptions import BadRequestError, ModelNotFoundError
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main.main(words)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_usage_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for words, expected in ([], 2), (["--help"], 0), (["-h"], 0):
        code, out, _ = run(capsys, *words)
        assert code == expected
        for name in main.command_names():
            assert f"  {name} " in out
    assert {"demo", "collect-env"} <= set(main.command_names())


def test_every_command_has_help_arguments_and_a_run() -> None:
    for name in main.command_names():
        command = main.load_command(name)
        assert (command.__doc__ or "").strip().endswith(".")
        assert callable(command.add_arguments)
        assert callable(command.run)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, vllm.__version__ + "\n", "")


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "dem")
    assert (code, out) == (2, "")
    assert "did you mean demo?" in err


def test_help_of_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main.main(["demo", "--help"])
    assert caught.value.code == 0
    assert "--temperature" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BadRequestError("n must be 1", "n"), 2),
        (ModelNotFoundError("no model 'x'"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_are_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    def fail(args: object) -> int:
        raise error

    monkeypatch.setattr(demo, "run", fail)
    got, _, err = run(capsys, "demo")
    assert got == code
    assert err == (f"vllm demo: {error}\n" if str(error) else "")


def test_an_unexpected_error_keeps_its_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(args: object) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(demo, "run", fail)
    with pytest.raises(ZeroDivisionError):
        main.main(["demo"])


def test_as_a_module_and_into_a_closed_pipe() -> None:
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == vllm.__version__
    with subprocess.Popen([*command, "collect-env"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.wait(60) in (0, 1)
        assert process.stderr.read() == b""


def test_collect_env(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "do not show")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    code, out, _ = run(capsys, "collect-env", "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["vllm"] == vllm.__version__
    assert facts["numpy"]
    assert facts["VLLM_LOGGING_LEVEL"] == "INFO"
    assert facts["VLLM_API_KEY"] == "(hidden)"
    code, out, _ = run(capsys, "collect-env")
    assert code == 0
    assert "do not show" not in out
    assert all(any(line.startswith(name) for line in out.splitlines()) for name in facts)


def test_collect_env_where_proc_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect_env, "_read", lambda path: "")
    facts = collect_env.collect()
    assert facts["memory"] is None
    assert facts["cpu"]


class StandIn:
    """What `vllm demo` uses of an LLM."""

    made: list[StandIn]
    template: str | None = "a template"

    def __init__(self, model: str) -> None:
        self.model = model
        self.llm_engine = types.SimpleNamespace(tokenizer=types.SimpleNamespace(chat_template=self.template))
        self.closed = False
        self.asked: Any = None
        type(self).made.append(self)

    def chat(self, messages: Any, params: SamplingParams, use_tqdm: bool) -> list[RequestOutput]:
        self.asked = messages
        return self._outputs(params)

    def generate(self, prompt: str, params: SamplingParams, use_tqdm: bool) -> list[RequestOutput]:
        self.asked = prompt
        return self._outputs(params)

    def _outputs(self, params: SamplingParams) -> list[RequestOutput]:
        logprobs = [{7: Logprob(-0.1, 1, "good ")}, {8: Logprob(-3.0, 9, "\x1b[2Jbad")}]
        completions = [
            CompletionOutput(index, "good \x1b[2Jbad", [7, 8], -3.1, logprobs, "stop") for index in range(params.n)
        ]
        return [RequestOutput("0", None, [1, 2, 3], None, completions, True)]

    def shutdown(self) -> None:
        self.closed = True


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> type[StandIn]:
    cls = type("LLM", (StandIn,), {"made": []})
    monkeypatch.setitem(vars(vllm), "LLM", cls)
    monkeypatch.setenv("COLUMNS", "120")
    return cls


def test_demo(capsys: pytest.CaptureFixture[str], stand_in: type[StandIn]) -> None:
    code, out, _ = run(capsys, "demo", "-n", "3", "--prompt", "Why [bold]?", "--seed", "1")
    assert code == 0
    (llm,) = stand_in.made
    assert llm.closed
    assert llm.asked == [{"role": "user", "content": "Why [bold]?"}]
    assert out.count("log p -3.1, mean -1.55") == 3
    assert out.count(": 2 tokens, stop") == 3
    assert "Why [bold]?" in out
    assert "3 answers, 6 tokens in" in out
    assert "tokens/s" in out
    assert "Prompt of 3 tokens" in out
    assert "\x1b[2J" not in out  # a model's words do not steer the terminal


def test_demo_without_a_chat_template(capsys: pytest.CaptureFixture[str], stand_in: type[StandIn]) -> None:
    stand_in.template = None
    code, _, _ = run(capsys, "demo", "-n", "1", "--prompt", "Once", "--temperature", "0")
    assert code == 0
    assert stand_in.made[0].asked == "Once"


def test_demo_refuses_before_it_loads_a_model(capsys: pytest.CaptureFixture[str], stand_in: type[StandIn]) -> None:
    code, _, err = run(capsys, "demo", "-n", "4", "--temperature", "0")
    assert code == 2
    assert "temperature" in err
    assert stand_in.made == []


def test_demo_colours_unlikely_tokens() -> None:
    logprobs = [{1: Logprob(-0.1, 1, "sure ")}, {2: Logprob(-1.0, 2, "maybe ")}, {3: Logprob(-5.0, 30, "odd")}]
    text = demo._coloured(CompletionOutput(0, "sure maybe od", [1, 2, 3], -6.1, logprobs, "length"))
    assert text.plain == "sure maybe od"
    assert [(span.start, span.end, span.style) for span in text.spans] == [(5, 11, "yellow"), (11, 13, "red")]
    split = [{1: Logprob(-0.1, 1, "\ufffd")}, {2: Logprob(-5.0, 9, "\ufffd")}]
    assert demo._coloured(CompletionOutput(0, "é", [1, 2], -5.1, split)).spans == []


@pytest.mark.parametrize(("answers", "rows"), [(1, [1]), (3, [3]), (4, [2, 2]), (6, [3, 3]), (7, [3, 3, 1])])
def test_demo_lays_the_answers_out_in_even_rows(
    capsys: pytest.CaptureFixture[str], stand_in: type[StandIn], answers: int, rows: list[int]
) -> None:
    _, out, _ = run(capsys, "demo", "-n", str(answers), "--prompt", "x", "--max-tokens", "1")
    assert [line.count("2 tokens, stop") for line in out.splitlines() if "2 tokens, stop" in line] == rows


def test_demo_for_real(smollm2_path: object) -> None:
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "demo", "-n", "2", "--max-tokens", "4", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("tokens, ") >= 2
    assert "2 answers, " in done.stdout
