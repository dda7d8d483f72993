"""The examples of docs/ and README.md run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.md", "docs/parallel-sampling.md"]


def examples(page: str) -> str:
    """All Python examples of a page, as one program: later ones build on earlier ones."""
    return "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL))


@pytest.mark.parametrize("page", PAGES)
def test_the_examples_run(page: str, tmp_path: Path) -> None:
    program = tmp_path / "examples.py"
    # The own-process engine imports the main module again, so the examples stand under its guard.
    body = "\n".join("    " + line for line in examples(page).splitlines())
    program.write_text(f"if __name__ == '__main__':\n{body}\n")
    result = subprocess.run(
        [sys.executable, str(program)],
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.strip()


@pytest.mark.parametrize(
    "page", sorted(str(p.relative_to(ROOT)) for p in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
)
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    targets = [target for target in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in target]
    missing = [target for target in targets if not (ROOT / page).parent.joinpath(target).exists()]
    assert not missing
