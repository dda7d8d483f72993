"""The command line beside the server: its flags and file, and the clients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.entrypoints.openai.server import Server
from vllm.entrypoints.cli import main, serve
from vllm.entrypoints.openai.server_args import engine_args, server_args, with_config_file
from vllm.exceptions import ConfigError, UnsupportedError
from vllm.utils.argparse_utils import FlexibleArgumentParser


def parse(*words: str) -> tuple[Any, Any]:
    parser = FlexibleArgumentParser(prog="vllm serve")
    serve.add_arguments(parser)
    args = parser.parse_args(words)
    return engine_args(args), server_args(args)


def test_defaults() -> None:
    engine, server = parse()
    assert engine.model == "smollm2-135m-instruct"
    assert (server.host, server.port, server.api_keys, server.restart_engine) == (None, 8000, (), False)
    assert server.model_names("m") == ["m"]


def test_flags() -> None:
    engine, server = parse(
        "some/model", "--port", "1", "--max-model-len", "4k", "--no-enable-prefix-caching", "--served-model-name", "a",
        "b", "--disable-log-requests", "--api-key", "k", "--uvicorn-log-level", "info", "--max_n", "7",
    )  # fmt: skip
    assert (engine.model, engine.max_model_len, engine.enable_prefix_caching, engine.max_n) == (
        "some/model",
        4000,
        False,
        7,
    )
    assert engine.served_model_name == "a"
    assert server.model_names("m") == ["a", "b"]
    assert server.api_keys == ("k",)
    assert parse("--model", "x")[0].model == "x"
    with pytest.raises(ConfigError, match="twice"):
        parse("y", "--model", "x")


def test_key_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert parse()[1].api_keys == ("secret",)
    assert parse("--api-key", "other")[1].api_keys == ("other",)
    engine, server = parse("--api-key", "a", "--api-key", "b", "some/model")
    assert (engine.model, server.api_keys) == ("some/model", ("a", "b"))


@pytest.mark.parametrize(
    "words", [["--port", "70000"], ["--root-path", "x"], ["--api-key", " "], ["--max-body-size", "0"]]
)
def test_wrong_values(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=words[0][2:].replace("-", "_")):
        parse(*words)


def test_unknown_flags_are_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse("--no-such-flag", "3")
    assert caught.value.code == 2
    assert "--no-such-flag" in capsys.readouterr().err
    with pytest.raises(UnsupportedError, match="tensor_parallel_size"):
        parse("--tensor-parallel-size", "2")[0].create_engine_config()


def test_help_is_grouped(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["serve", "--help"])
    out = capsys.readouterr().out
    for word in ("server:", "chat:", "model:", "scheduler:", "--restart-engine", "--max-queue-size", "--config"):
        assert word in out


def test_config_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "model: some/model\nport: 1234\nmax-model-len: 2k\nenable_prefix_caching: false\nrestart-engine: true\n"
        "served-model-name: [a, b]\napi-key: [k, l]\nhf_overrides: {rope_theta: 1}\nseed: null\n"
    )
    engine, server = parse("--config", str(file), "--port", "99")
    assert (engine.model, engine.max_model_len, engine.enable_prefix_caching) == ("some/model", 2000, False)
    assert engine.hf_overrides == {"rope_theta": 1}
    assert (server.port, server.restart_engine, server.served_names) == (99, True, ("a", "b"))
    assert server.api_keys == ("k", "l")
    assert parse("other", f"--config={file}")[0].model == "other"
    assert with_config_file(["x", "--port", "1"]) == ["x", "--port", "1"]


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "3: 4", "'--x y': 1"])
def test_wrong_config_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    for name in (file, tmp_path / "none.yaml"):
        with pytest.raises(SystemExit) as caught:
            parse("--config", str(name))
        assert caught.value.code == 2
        assert "--config" in capsys.readouterr().err


def test_chat_template_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{{ messages }}")
    assert parse("--chat-template", str(file))[1].chat_template == "{{ messages }}"
    with pytest.raises(ConfigError, match="none.jinja"):
        parse("--chat-template", str(tmp_path / "none.jinja"))


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main.main(words)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_complete(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["complete", "--url", server.url + "/v1", "-q", "abc", "--seed", "3", "--max-tokens", "5"]
    code, one, _ = run(capsys, *words)
    assert (code, one.count("---")) == (0, 0)
    code, four, _ = run(capsys, *words, "-n", "4")
    assert (code, four.count("---")) == (0, 4)
    assert one.strip() in four
    code, _, error = run(capsys, *words, "-n", "0")
    assert code == 2
    assert "n" in error


def test_chat(server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["chat", "--url", server.url + "/v1", "--max-tokens", "5", "--system-prompt", "Be short."]
    assert run(capsys, *words, "-q", "Hi")[0] == 0
    said = iter(["Hi", "", "more"])

    def ask(_: str) -> str:
        try:
            return next(said)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", ask)
    assert run(capsys, *words)[0] == 0


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = run(capsys, "complete", "--url", "http://127.0.0.1:9/v1", "-q", "x")
    assert code == 1
    assert "vllm serve" in error
    assert run(capsys, "complete", "--url", "file:///etc", "-q", "x")[0] == 2
