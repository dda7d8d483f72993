"""`make bench` and the page that it writes: parts stand in for the real ones, which take minutes."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest

from vllm.entrypoints.cli import bench
from vllm.utils.argparse_utils import FlexibleArgumentParser

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "performance.md"


@pytest.fixture
def run_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script as a module, with a page, a baseline folder and an output folder of its own."""
    spec = importlib.util.spec_from_file_location("run_all", ROOT / "benchmarks" / "run_all.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "run_all", module)  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    page = tmp_path / "docs" / "performance.md"
    page.parent.mkdir()
    page.write_text(f"before\n{module.BEGIN}\nold\n{module.END}\nafter\n")
    monkeypatch.setattr(module, "DOCS", page)
    monkeypatch.setattr(module, "BASELINE", tmp_path / "baseline")
    return module


def call(module: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["run_all", "--output-dir", str(folder), *words])
    code: int = module.main()
    return code


def test_tables_pictures_and_the_page(run_all: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def result(n: int) -> dict[str, object]:
        return {
            "benchmark": "throughput",
            "n": n,
            "output_throughput": 10.0 * n,
            "prompt_tokens_computed": 512,
            "steps": 64,
        }

    def fake_call(run: object, *words: str, **_: object) -> str:
        target = Path(words[words.index("--output-json") + 1])
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(result(int(words[words.index("--n") + 1]))))
        return ""

    monkeypatch.setattr(run_all.Run, "call", fake_call)
    folder = tmp_path / "out"
    assert call(run_all, monkeypatch, folder, "--only", "width", "--save-baseline", "--update-docs") == 0
    report = (folder / "report.md").read_text()
    assert "| 64 | 640.0 | 64.0 | 512 | 64 |" in report
    assert (folder / "throughput-n.png").is_file()
    assert sorted(path.name for path in run_all.BASELINE.iterdir()) == [f"width-{n}.json" for n in (1, 16, 4, 64)]
    page = run_all.DOCS.read_text()
    assert page.startswith(f"before\n{run_all.BEGIN}\n### width")
    assert page.endswith(f"{run_all.END}\nafter\n")
    assert "old" not in page
    assert "(performance/throughput-n.png)" in page
    assert (run_all.DOCS.parent / "performance" / "throughput-n.png").is_file()


def test_a_part_that_fails_does_not_stop_the_others(
    run_all: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[str] = []

    def broken(run: object) -> None:
        """It breaks."""
        raise run_all.PartError("a script ended with code 3")

    def good(run: object) -> None:
        """It works."""
        done.append("good")
        run.sections["good"] = "a table"  # type: ignore[attr-defined]

    monkeypatch.setattr(run_all, "PARTS", {"broken": broken, "good": good})
    assert call(run_all, monkeypatch, tmp_path / "out") == 1
    assert done == ["good"]
    captured = capsys.readouterr()
    assert "failed: broken: PartError: a script ended with code 3" in captured.err
    assert "It works." in captured.out


def test_a_script_that_fails_or_hangs(run_all: ModuleType, tmp_path: Path) -> None:
    run = run_all.Run("m", tmp_path, True)
    with pytest.raises(run_all.PartError, match=r"plot\.py ended with code 2"):
        run.call("plot.py")
    with pytest.raises(run_all.PartError, match="took more than 0 s"):
        run.call("plot.py", "--help", timeout=0.01)
    assert "usage: vllm bench plot" in run.call("plot.py", "--help", capture=True)


def test_the_counts_part(run_all: ModuleType, tmp_path: Path) -> None:
    run = run_all.Run("m", tmp_path, True)
    run_all.counts(run)
    assert "prompt_tokens_computed" in run.sections["counts"]
    run_all.limits(run)
    assert "GB/s" in run.sections["limits"]


# The page


def test_the_pages_commands_are_valid() -> None:
    text = PAGE.read_text(encoding="utf-8")
    commands = re.findall(r"^vllm bench (.+)$", text, re.MULTILINE)
    assert len(commands) >= 4
    for command in commands:
        parser = FlexibleArgumentParser()
        bench.add_arguments(parser)
        parser.parse_args(shlex.split(command))  # exits, which fails the test, for a flag that does not exist
    readme = (ROOT / "examples" / "configs" / "README.md").read_text()
    (command,) = re.findall(r"^vllm bench (.+)$", readme, re.MULTILINE)
    parser = FlexibleArgumentParser()
    bench.add_arguments(parser)
    assert (ROOT / parser.parse_args(shlex.split(command)).model).is_file()


def test_the_pages_links_and_markers() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.count("<!-- tables: begin -->") == text.count("<!-- tables: end -->") == 1
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (PAGE.parent / target).exists(), target


def test_make_bench_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^bench:.*\n\t.*benchmarks/run_all\.py \$\(BENCH_ARGS\)", makefile, re.MULTILINE)
