#!/usr/bin/env python3
"""Every table and picture of docs/performance.md, within a quarter of an hour on two cores: `make bench`.

    python benchmarks/run_all.py [--output-dir DIR] [--quick] [--only PART ...] [--save-baseline] [--update-docs]

Each part runs in processes of its own; one that fails is named at the end, and the others are done all the same.
Results go to OUTPUT_DIR as JSON, tables to report.md, pictures beside it, with the baseline (benchmarks/baseline/) in
grey. --save-baseline makes this run the baseline, --update-docs puts its tables into docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from vllm.benchmarks import machine, plots, portable, results
from vllm.benchmarks.results import Result
from vllm.exceptions import VLLMError
from vllm.utils.network_utils import get_open_port

HERE = Path(__file__).resolve().parent
BASELINE = HERE / "baseline"
DOCS = HERE.parent / "docs" / "performance.md"
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"

CASES = ("1x1:32:128", "32x1:128:128", "4x8:512:128", "1x64:1024:64")
"""prompts x n : prompt tokens : output tokens."""
WIDTHS = (1, 4, 16, 64)
RATES = (1.0, 2.0, 4.0, "inf")


class PartError(Exception):
    """A part did not come through."""


@dataclass
class Run:
    """The run's settings, and what has come of it."""

    model: str
    folder: Path
    quick: bool
    sections: dict[str, str] = field(default_factory=dict)

    def json(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def call(self, *words: str, timeout: float = 240, capture: bool = False) -> str:
        """One of the scripts, or a module after "-m". Raises PartError."""
        print("+", " ".join(words), file=sys.stderr, flush=True)
        name = words[1] if words[0] == "-m" else words[0]
        command = [sys.executable, *words] if words[0] == "-m" else [sys.executable, str(HERE / name), *words[1:]]
        try:
            done = subprocess.run(
                command,
                check=False,
                cwd=HERE.parent,
                timeout=timeout,
                text=True,
                stdout=subprocess.PIPE if capture else sys.stderr,
            )
        except subprocess.TimeoutExpired:
            raise PartError(f"{name} took more than {timeout:.0f} s") from None
        if done.returncode:
            raise PartError(f"{name} ended with code {done.returncode}")
        return done.stdout or ""


# Parts


def limits(run: Run) -> None:
    """What the machine can do in these minutes."""
    found = machine.measure_limits("bfloat16")
    single = machine.measure_limits("float32")
    rows = [
        ["memory bandwidth", f"{found.bandwidth / 1e9:.0f} GB/s"],
        ["bf16 products", f"{found.flops / 1e9:.0f} GFLOP/s"],
        ["fp32 products", f"{single.flops / 1e9:.0f} GFLOP/s"],
    ]
    where = f"{results.cpu_name()}, {found.threads} threads, {time.strftime('%Y-%m-%d')}"
    load = os.getloadavg()[0]
    run.sections["limits"] = (
        f"{where}, model {run.model}. Load average at the start: {load:.1f}"
        f"{' (other programs took part of the machine)' if load > 0.7 else ''}.\n\n"
        + results.markdown(["limit", "measured"], rows)
    )
    results.write(run.json("limits"), {"bandwidth": found.bandwidth, "bf16": found.flops, "fp32": single.flops})


def throughput(run: Run) -> None:
    """The four cases in which this project measures itself, and the first one in int8."""
    rows = []
    turns = 1 if run.quick else 3
    for case, quantization in [*((case, None) for case in CASES), (CASES[0], "int8")]:
        more = ["--quantization", quantization] if quantization else []
        name = f"throughput-{case.replace(':', '-')}{'-int8' if quantization else ''}"
        found = [_throughput(run, f"turns/{name}-{turn}", portable.parse_case(case), *more) for turn in range(turns)]
        found.sort(key=lambda result: result["output_throughput"])
        middle = found[len(found) // 2]
        results.write(run.json(name), middle)
        rows.append(
            [
                f"{case}{', int8' if quantization else ''}",
                f"{middle['output_throughput']:,.1f}",
                f"{found[0]['output_throughput']:,.1f} – {found[-1]['output_throughput']:,.1f}",
                f"{middle['bandwidth_fraction']:.0%} of {middle['bandwidth_limit'] / 1e9:.0f} GB/s",
                f"{middle['flops_fraction']:.0%} of {middle['flops_limit'] / 1e9:.0f} GFLOP/s",
                f"{middle['prompt_tokens_computed']:,}",
                f"{middle['peak_memory_bytes'] / 2**20:,.0f}",
                f"{middle['startup']:.1f}",
            ]
        )
    header = ["prompts x n : in : out", "output tokens/s", f"least – most of {turns}", "bandwidth", "arithmetic"]
    header += ["prompt tokens computed", "peak MiB", "start s"]
    run.sections["throughput"] = results.markdown(header, rows)


def width(run: Run) -> None:
    """One prompt of 512 tokens, 64 output tokens, more and more completions."""
    found = [_throughput(run, f"width-{n}", (1, n, 512, 64)) for n in WIDTHS]
    rows = [
        [
            str(result["n"]),
            f"{result['output_throughput']:,.1f}",
            f"{result['output_throughput'] / found[0]['output_throughput']:.1f}",
            f"{result['prompt_tokens_computed']:,}",
            f"{result['steps']:,}",
        ]
        for result in found
    ]
    header = ["n", "output tokens/s", "times n = 1", "prompt tokens computed", "steps"]
    run.sections["width"] = results.markdown(header, rows) + "\n![throughput against n](throughput-n.png)\n"
    plots.draw(found, run.folder / "throughput-n.png", _baselines("width-*.json"))


def latency(run: Run) -> None:
    """A batch of 8 prompts, n = 1 and n = 4."""
    rows = []
    for n in (1, 4):
        name = f"latency-{n}"
        run.call(
            "benchmark_latency.py", "--model", run.model, "--input-len", "128", "--output-len", "64", "--batch-size",
            "8", "--n", str(n), "--num-iters", "2" if run.quick else "5", "--output-json", str(run.json(name)),
        )  # fmt: skip
        result = results.read(run.json(name))
        figures = [result["avg_latency"], result["percentiles"]["99"]]
        times = [result[key] for key in ("mean_ttft_ms", "p99_ttft_ms", "mean_itl_ms", "p99_itl_ms")]
        spread = result.get("mean_child_spread_ms")
        rows.append(
            [
                f"8 x {n}",
                *(f"{figure:.2f}" for figure in figures),
                *(f"{figure:.0f}" for figure in times),
                "-" if spread is None else f"{spread:.1f}",
            ]
        )
    header = ["batch", "mean s", "P99 s", "TTFT ms", "P99", "ITL ms", "P99", "first to last child ms"]
    run.sections["latency"] = results.markdown(header, rows)


def serve(run: Run) -> None:
    """Our own conversations at several rates, against `vllm serve`."""
    count = 12 if run.quick else 32
    found: list[Result] = []
    with _server(run) as url:
        for rate in RATES[1:] if run.quick else RATES:
            path = run.json(f"serve-{rate}")
            run.call(
                "benchmark_serving.py", "--base-url", url, "--model", run.model, "--num-prompts", str(count),
                "--request-rate", str(rate), "--disable-tqdm", "--ready-check-timeout-sec", "120",
                "--result-dir", str(path.parent), "--result-filename", path.name,
            )  # fmt: skip
            found.append(results.read(path))
    rows = [
        [
            str(result["request_rate"]),
            f"{result['request_throughput']:.2f}",
            f"{result['output_throughput']:,.0f}",
            *(f"{result[f'{what}_{name}_ms']:,.0f}" for name in ("ttft", "tpot", "itl") for what in ("median", "p99")),
        ]
        for result in found
    ]
    header = ["requests/s asked", "done", "output tokens/s", "TTFT ms", "P99", "TPOT ms", "P99", "ITL ms", "P99"]
    run.sections["serve"] = results.markdown(header, rows) + "\n![latency against rate](latency-rate.png)\n"
    plots.draw(found, run.folder / "latency-rate.png", _baselines("serve-*.json"))


def output_layer(run: Run) -> None:
    """µs per token of the output layer alone, and what the n = 1 seam costs."""
    path = run.json("output-layer")
    run.call("benchmark_output_processor.py", "--repeats", "3" if run.quick else "7", "--json", str(path))
    found = json.loads(path.read_text())
    kinds = list(found["seam"])
    rows = [[shape, *(f"{row[kind]:.2f}" for kind in kinds)] for shape, row in found["us_per_token"].items()]
    for twin, words in (("method", "a method in its place"), ("inline", "the same written into the loop")):
        rows.append([f"n = 1: with the seam / {words}", *(f"{found['seam'][kind][twin]:.3f}" for kind in kinds)])
    run.sections["output layer"] = results.markdown(["requests x n", *kinds], rows)


def counts(run: Run) -> None:
    """Work per workload, in counts."""
    text = run.call("counts.py", "--expected", str(HERE.parent / "tests" / "benchmarks" / "counts.json"), capture=True)
    run.sections["counts"] = "```\n" + text.rstrip() + "\n```\n"


def kernels(run: Run) -> None:
    """The kernels' own table."""
    kinds = "bfloat16" if run.quick else "bfloat16,int8"
    table = run.call("-m", "benchmarks.kernels", "--kinds", kinds, timeout=400, capture=True)
    run.sections["kernels"] = "```\n" + table.rstrip() + "\n```\n"


PARTS: dict[str, Callable[[Run], None]] = {
    "limits": limits,
    "throughput": throughput,
    "width": width,
    "latency": latency,
    "serve": serve,
    "output layer": output_layer,
    "counts": counts,
    "kernels": kernels,
}


# Help


def _throughput(run: Run, name: str, shape: tuple[int, int, int, int], *more: str) -> Result:
    prompts, n, prompt_len, output_len = shape
    run.call(
        "benchmark_throughput.py", "--model", run.model, "--num-prompts", str(prompts), "--n", str(n), "--input-len",
        str(prompt_len), "--output-len", str(output_len), "--output-json", str(run.json(name)), *more,
    )  # fmt: skip
    return results.read(run.json(name))


def _baselines(pattern: str) -> list[Result]:
    return [results.read(path) for path in sorted(BASELINE.glob(pattern))]


@contextmanager
def _server(run: Run) -> Iterator[str]:
    port = get_open_port()
    log = run.folder / "server.log"
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", run.model, "--port", str(port)]
    command += ["--disable-log-requests", "--no-enable-prefix-caching"]
    with log.open("w") as file, subprocess.Popen(command, stdout=file, stderr=file) as server:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()


def report(run: Run) -> str:
    """The tables, each under what its part says of itself."""
    blocks = [f"### {name}\n\n{PARTS[name].__doc__}\n\n{text}" for name, text in run.sections.items()]
    return "\n".join(blocks)


def update_docs(run: Run) -> None:
    text = DOCS.read_text(encoding="utf-8")
    pictures = DOCS.parent / "performance"
    pictures.mkdir(exist_ok=True)
    tables = report(run)
    for picture in run.folder.glob("*.png"):
        shutil.copy(picture, pictures / picture.name)
        tables = tables.replace(f"({picture.name})", f"(performance/{picture.name})")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    DOCS.write_text(f"{before}{BEGIN}\n{tables}\n{END}{after}", encoding="utf-8")


def save_baseline(run: Run) -> None:
    BASELINE.mkdir(exist_ok=True)
    for pattern in ("throughput-*.json", "width-*.json", "latency-*.json", "serve-*.json"):
        for path in run.folder.glob(pattern):
            shutil.copy(path, BASELINE / path.name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--output-dir", type=Path, default=Path("bench-results"))
    parser.add_argument("--quick", action="store_true", help="fewer turns, for a look (about half the time)")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--save-baseline", action="store_true")
    parser.add_argument("--update-docs", action="store_true")
    args = parser.parse_args()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    model = str(Path(args.model).resolve()) if Path(args.model).exists() else args.model
    run = Run(model, args.output_dir.resolve(), args.quick)
    failed: dict[str, str] = {}
    spent: dict[str, float] = {}
    for name in args.only or PARTS:
        begun = time.monotonic()
        try:
            PARTS[name](run)
        except (PartError, VLLMError, KeyError) as error:
            failed[name] = f"{type(error).__name__}: {error}"
        spent[name] = time.monotonic() - begun
    (run.folder / "report.md").write_text(report(run), encoding="utf-8")
    print(report(run))
    if args.save_baseline:
        save_baseline(run)
    if args.update_docs:
        update_docs(run)
    times = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in spent.items())
    print(f"{sum(spent.values()):.0f} s: {times}. Tables and pictures: {run.folder}")
    for name, why in failed.items():
        print(f"failed: {name}: {why}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
