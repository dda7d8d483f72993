"""The regression guard: work that the engine does for a workload, counted. After a change that is meant to alter it:

python benchmarks/counts.py --expected tests/benchmarks/counts.json --update
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import pytest

from vllm.benchmarks import counts

FILE = Path(__file__).parent / "counts.json"
EXPECTED: dict[str, dict[str, int]] = json.loads(FILE.read_text())


def test_every_workload_has_an_expectation() -> None:
    assert set(EXPECTED) == {workload.name for workload in counts.WORKLOADS}


@pytest.mark.parametrize("workload", counts.WORKLOADS, ids=lambda workload: workload.name)
def test_counts(workload: counts.Workload) -> None:
    name = workload.name
    found = counts.differences({name: EXPECTED[name]}, {name: counts.count(workload)})
    assert not found


@pytest.mark.parametrize("workload", counts.WORKLOADS, ids=lambda workload: workload.name)
def test_expectations_make_sense(workload: counts.Workload) -> None:
    own = EXPECTED[workload.name]
    prompts = 1 if workload.same_prompt else workload.prompts
    assert own["prompt_tokens_computed"] == prompts * workload.prompt_len
    assert own["messages"] <= own["steps"]
    if workload.kind is counts.RequestOutputKind.FINAL_ONLY:
        assert own["outputs"] == workload.prompts
    else:
        assert own["outputs"] == workload.prompts * workload.output_len


def test_a_difference_is_named() -> None:
    (name, values), *_ = EXPECTED.items()
    worse = copy.deepcopy({name: values})
    worse[name]["steps"] += 1
    assert counts.differences({name: values}, worse) == [
        f"{name}: steps is {values['steps'] + 1}, not {values['steps']}"
    ]
    worse = copy.deepcopy({name: values})
    worse[name]["calls_per_step"] += 1
    assert "above" in counts.differences({name: values}, worse)[0]
    better = copy.deepcopy({name: values})
    better[name]["calls_per_step"] -= 1
    assert counts.differences({name: values}, better) == []
    assert counts.differences({name: values}, {}) == [f"{name}: not counted"]
    assert counts.differences({}, {name: values}) == [f"{name}: not expected"]


def test_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(counts, "WORKLOADS", counts.WORKLOADS[:1])
    file = tmp_path / "expected.json"
    monkeypatch.setattr(sys, "argv", ["counts", "--expected", str(file), "--update"])
    assert counts.main() == 0
    monkeypatch.setattr(sys, "argv", ["counts", "--expected", str(file)])
    assert counts.main() == 0
    changed = json.loads(file.read_text())
    changed[counts.WORKLOADS[0].name]["messages"] += 1
    file.write_text(json.dumps(changed))
    capsys.readouterr()
    assert counts.main() == 1
    assert "messages is" in capsys.readouterr().err
