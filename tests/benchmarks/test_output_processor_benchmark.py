"""The benchmark of the output layer runs, and what it compares is equal but for the seam."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.v1.engine.fakes import bundled_tokenizer
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.output_processor import OutputProcessor

PATH = Path(__file__).parents[2] / "benchmarks" / "benchmark_output_processor.py"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("benchmark_output_processor", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_runs(benchmark, monkeypatch, tmp_path, capsys):
    target = tmp_path / "figures.json"
    monkeypatch.setattr(benchmark, "SHAPES", ((2, 1), (1, 3)))
    monkeypatch.setattr(sys, "argv", [str(PATH), "--output-len", "4", "--repeats", "1", "--json", str(target)])
    benchmark.main()
    shown = capsys.readouterr().out
    assert "2x1" in shown
    assert "1x3" in shown
    figures = json.loads(target.read_text())
    assert figures["us_per_token"].keys() == {"2x1", "1x3"}
    assert all(value > 0 for row in figures["us_per_token"].values() for value in row.values())
    assert figures["seam"].keys() == {"FINAL_ONLY", "DELTA", "CUMULATIVE"}


@pytest.mark.parametrize("kind", RequestOutputKind, ids=lambda kind: kind.name)
def test_the_twins_without_a_seam_say_the_same(benchmark, kind):
    tokens = np.random.default_rng(0).integers(100, 40_000, 5 * 8).astype(np.int32)
    said = []
    for make in (OutputProcessor, benchmark.MethodProcessor, benchmark.InlineProcessor):
        processor = make(bundled_tokenizer())
        for submission in benchmark.submissions(5, 1, kind, 8):
            processor.add(submission)
        outputs = [o for step in benchmark.messages(5, 8, kind, tokens) for o in processor.process(step).outputs]
        processor.check_idle()
        said.append([(o.request_id, o.outputs, o.finished, o.prompt_token_ids) for o in outputs])
    assert said[0] == said[1] == said[2]
