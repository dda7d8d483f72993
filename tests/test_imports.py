"""The direction of imports (docs/architecture.md, "Layers"), read from the source, and what stays unloaded."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "vllm"

# A layer may import from itself, from the layers named beside it, and from plain data.
ALLOWED = {
    "vllm.kernels": set(),
    "vllm.v1.sample": {"vllm.model_executor.backends.interface", "vllm.kernels"},
    "vllm.v1.attention": {"vllm.model_executor.backends.interface", "vllm.model_executor.spec", "vllm.kernels"},
    "vllm.model_executor": {"vllm.kernels", "vllm.v1.attention", "vllm.v1.sample"},
    "vllm.v1.worker": {"vllm.model_executor", "vllm.v1.sample"},
    "vllm.v1.executor": {"vllm.v1.worker", "vllm.model_executor"},
    "vllm.v1.core": {"vllm.model_executor.backends.interface"},
    "vllm.v1.engine": {
        "vllm.v1.core",
        "vllm.v1.executor",
        "vllm.v1.metrics",
        "vllm.tokenizers",
        "vllm.engine.arg_utils",
    },
}
PLAIN_DATA = {
    "vllm.config",
    "vllm.envs",
    "vllm.exceptions",
    "vllm.inputs",
    "vllm.logger",
    "vllm.logprobs",
    "vllm.lora",
    "vllm.outputs",
    "vllm.sampling_params",
    "vllm.utils",
    "vllm.v1.messages",
    "vllm.v1.step",
    "vllm.version",
}
HEAVY = ("torch", "transformers", "fastapi", "triton")
WITHOUT_TORCH = ["vllm.v1.core", "vllm.v1.engine", "vllm.v1.worker", "vllm.v1.sample", "vllm.v1.executor"]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def imports_of(path: Path) -> list[tuple[str, bool]]:
    """Every `vllm…` or torch import of a file, with whether it stands under `if TYPE_CHECKING`."""
    found: list[tuple[str, bool]] = []

    def visit(node: ast.AST, typing_only: bool) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            typing_only = True
        if isinstance(node, ast.Import):
            found.extend((alias.name, typing_only) for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            submodules = [alias.name for alias in node.names if is_module(f"{node.module}.{alias.name}")]
            found.extend((f"{node.module}.{name}", typing_only) for name in submodules)
            if len(submodules) < len(node.names):
                found.append((node.module, typing_only))
        for child in ast.iter_child_nodes(node):
            visit(child, typing_only)

    visit(ast.parse(path.read_text()), False)
    return found


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def layer_of(name: str) -> str | None:
    return next((layer for layer in ALLOWED if within(name, layer)), None)


LAYERED = sorted(path for path in PACKAGE.rglob("*.py") if layer_of(module_name(path)))


@pytest.mark.parametrize("path", LAYERED, ids=module_name)
def test_imports_point_one_way(path: Path) -> None:
    layer = layer_of(module_name(path))
    assert layer is not None
    allowed = {layer, *ALLOWED[layer], *PLAIN_DATA}
    wrong = [
        name
        for name, _ in imports_of(path)
        if within(name, "vllm") and name != "vllm" and not any(within(name, package) for package in allowed)
    ]
    assert not wrong, f"{module_name(path)} may not import {wrong}"


@pytest.mark.parametrize("package", WITHOUT_TORCH)
def test_no_module_of_the_package_imports_torch(package: str) -> None:
    for path in LAYERED:
        if within(module_name(path), package):
            names = [name for name, typing_only in imports_of(path) if not typing_only]
            assert not [name for name in names if within(name, "torch") or within(name, "transformers")], path


@pytest.mark.parametrize(
    "statement", ["import vllm", "from vllm import SamplingParams", "import vllm.v1.engine.async_llm"]
)
def test_heavy_libraries_stay_unloaded(statement: str) -> None:
    code = f"import sys; {statement}; print([name for name in {HEAVY} if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
