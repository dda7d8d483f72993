"""Imports point one way (docs/architecture.md), there are no circles, and the front end and the core know no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "vllm").rglob("*.py"))
}

# A package may import what stands in its own row, the plain modules, and the rows that its entry names.
LAYERS = {
    "vllm.entrypoints": {
        "vllm.v1.engine",
        "vllm.v1.structured_output",
        "vllm.v1.metrics",
        "vllm.engine",
        "vllm.tokenizers",
        "vllm.kernels",
    },
    "vllm.entrypoints.cli.bench": {"vllm.benchmarks"},
    "vllm.benchmarks": {
        "vllm.v1.core",
        "vllm.v1.engine",
        "vllm.v1.executor",
        "vllm.engine",
        "vllm.entrypoints",
        "vllm.tokenizers",
        "vllm.kernels",
        "vllm.model_executor.loader",
        "vllm.model_executor.spec",
    },
    "vllm.engine": {"vllm.v1.engine", "vllm.model_executor.loader"},
    "vllm.v1.engine": {
        "vllm.v1.core",
        "vllm.v1.executor",
        "vllm.v1.metrics",
        "vllm.v1.structured_output",
        "vllm.tokenizers",
        "vllm.engine.arg_utils",
        "vllm.entrypoints.chat_utils",
        "vllm.model_executor.loader",
    },
    "vllm.v1.core": set(),
    "vllm.v1.executor": {"vllm.v1.worker", "vllm.v1.structured_output", "vllm.model_executor"},
    "vllm.v1.worker": {"vllm.v1.sample", "vllm.v1.structured_output", "vllm.model_executor", "vllm.tokenizers"},
    "vllm.v1.structured_output": {"vllm.tokenizers"},
    "vllm.v1.sample": set(),
    "vllm.v1.attention": {"vllm.model_executor"},
    "vllm.v1.metrics": set(),
    "vllm.model_executor": {"vllm.kernels", "vllm.v1.sample", "vllm.v1.attention"},
    "vllm.kernels": {"vllm.model_executor.spec", "vllm.v1.sample"},
    "vllm.tokenizers": {"vllm.model_executor.loader"},
}
PLAIN = {
    "vllm.config",
    "vllm.envs",
    "vllm.exceptions",
    "vllm.inputs",
    "vllm.logger",
    "vllm.logprobs",
    "vllm.lora.request",
    "vllm.model_executor.backends.interface",
    "vllm.outputs",
    "vllm.sampling_params",
    "vllm.utils",
    "vllm.v1.messages",
    "vllm.v1.step",
    "vllm.version",
}
TORCH = (
    "vllm.model_executor.backends.torch_",
    "vllm.model_executor.backends.triton_",
    "vllm.model_executor.torch_",
    "vllm.kernels.triton",
    "vllm.v1.attention.",
    "vllm.v1.worker.cuda_",
)
"""Modules whose names begin so are the torch and Triton backends."""


def within(module: str, packages: set[str]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def imports(path: Path, *, top_level_only: bool) -> set[str]:
    """Modules that a file imports, leaving out what stands under TYPE_CHECKING (and in functions, if asked)."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.update(alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}: relative import"
                for alias in child.names:
                    name = f"{child.module}.{alias.name}"
                    found.add(name if name in MODULES else str(child.module))
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                for other in child.orelse:
                    visit(other)
            elif not (top_level_only and isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))):
                visit(child)

    visit(ast.parse(path.read_text()))
    return found


@pytest.mark.parametrize("module", list(MODULES))
def test_imports_point_one_way(module: str) -> None:
    rows = [layer for layer in LAYERS if within(module, {layer})]
    wanted = imports(MODULES[module], top_level_only=False)
    ours = {name for name in wanted if within(name, {"vllm"})}
    if within(module, PLAIN):
        wrong = {name for name in ours if not within(name, PLAIN)}
    elif rows:
        row = max(rows, key=len)
        allowed = {row} | PLAIN | LAYERS[row]
        wrong = {name for name in ours if name != "vllm" and not within(name, allowed)}
    else:  # the package's own __init__, and the paths that exist for programs
        return
    assert not wrong, f"{module} must not import {sorted(wrong)}"


@pytest.mark.parametrize("module", [module for module in MODULES if not module.startswith(TORCH)])
def test_no_torch_at_import(module: str) -> None:
    heavy = {"torch", "transformers", "triton"}
    assert not {name for name in imports(MODULES[module], top_level_only=True) if within(name, heavy)}


def test_the_light_layers_import_without_torch() -> None:
    """All of them, in one new interpreter in which importing torch or transformers fails."""
    names = [name for name in MODULES if not name.startswith(TORCH)]
    code = f"""
import importlib, sys
for name in ("torch", "transformers", "triton", "safetensors"):
    sys.modules[name] = None
for name in {names!r}:
    importlib.import_module(name)
print("done")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=100)
    assert done.stdout.strip() == "done", done.stderr


def test_no_circles() -> None:
    graph = {module: imports(path, top_level_only=True) & MODULES.keys() for module, path in MODULES.items()}
    done: set[str] = set()

    def walk(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, " -> ".join([*way[way.index(module) :], module])
        if module not in done:
            for target in sorted(graph[module]):
                walk(target, (*way, module))
            done.add(module)

    for module in graph:
        walk(module, ())


def test_every_folder_says_what_lives_there() -> None:
    for path in (ROOT / "vllm").rglob("*.py"):
        init = path.parent / "__init__.py"
        assert init.is_file(), f"{path.parent} has no __init__.py"
        assert ast.get_docstring(ast.parse(init.read_text())), f"{init} has no docstring"
