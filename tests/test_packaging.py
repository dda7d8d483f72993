"""What a fresh machine relies on: the build without a compiler, the pins, the README's promises."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import vllm

ROOT = Path(__file__).resolve().parent.parent


def read(name: str) -> str:
    return (ROOT / name).read_text()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"VLLM_BUILD_KERNELS": "0"}, "VLLM_BUILD_KERNELS=0"),
        ({"PATH": "/nonexistent", "CXX": ""}, "no C++ compiler"),
    ],
)
def test_setup_without_kernels_warns_once_and_goes_on(settings: dict[str, str], reason: str) -> None:
    pytest.importorskip("setuptools")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "setup.py", "--version"],
        cwd=ROOT,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.strip().splitlines()[-1].replace("-", "+") == vllm.__version__
    assert done.stderr.count("WARNING") == 1
    assert reason in done.stderr


def test_torch_is_pinned_to_one_version_and_no_part_of_the_build() -> None:
    files = ("requirements/cpu.txt", "requirements/cuda.txt", "Makefile")
    pins = {pin for name in files for pin in re.findall(r"torch==[\d.]+", read(name))}
    assert pins == {"torch==2.13.0"}
    project = read("pyproject.toml")
    assert "torch" not in project[: project.index("[project]")]
    dependencies = project[project.index("\ndependencies = [") : project.index("[project.optional-dependencies]")]
    assert not re.search(r"torch|transformers", dependencies.split("[", 1)[1].split("]")[0])


def test_the_light_set_is_what_the_modules_import() -> None:
    """Every third-party import of ours is a declared dependency or in an extra."""
    listed = read("pyproject.toml").split("\ndependencies = [", 1)[1].split("]")[0]
    declared = {name.replace("-", "_") for name in re.findall(r'"([a-z0-9-]+)[>=<]', listed)}
    extras = {"torch", "transformers", "triton", "safetensors", "fastapi", "uvicorn", "pydantic", "prometheus_client"}
    extras |= {"aiohttp", "llguidance", "matplotlib", "opentelemetry"}
    extras |= {"starlette", "uvloop", "yaml"}  # come with fastapi and uvicorn[standard]
    known = {*declared, *extras, *sys.stdlib_module_names, "vllm", "zmq", "typing_extensions"}
    imported: set[str] = set()
    for path in (ROOT / "vllm").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported.update(alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                imported.add(str(node.module).split(".")[0])
    assert imported - known == set()
    unused = declared - imported - {"pyzmq"}
    assert not unused, f"{unused} are declared and imported nowhere"


def test_every_file_of_the_package_is_in_the_wheel() -> None:
    declared = re.search(r"^vllm = (\[.*\])", read("pyproject.toml"), re.MULTILINE)
    assert declared is not None
    patterns = [*ast.literal_eval(declared[1]), "py.typed"]
    for path in (ROOT / "vllm").rglob("*"):
        name = path.relative_to(ROOT / "vllm")
        if path.is_file() and path.suffix not in (".py", ".pyc"):
            assert any(name.match(pattern) for pattern in patterns), f"{name} is no package data in pyproject.toml"


def test_ci_runs_lint_and_tests() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    for target in ("venv", "lint", "test"):
        assert f"make {target}" in script.read_text()
        assert re.search(rf"^{target}:", read("Makefile"), re.MULTILINE)


def test_readme_says_first_what_this_is_not() -> None:
    first = " ".join(read("README.md").split("\n\n")[1].split())
    assert "not the vLLM project's own code" in first
    assert "takes the place of that package" in first
