"""The benchmarks behind `vllm bench` and the scripts in benchmarks/: data, measures, limits, results, pictures."""

from __future__ import annotations

BENCHMARKS = {
    "throughput": "everything at once, offline",
    "latency": "one batch, over and over, offline",
    "serve": "an OpenAI-compatible server, by URL",
    "compare": "two results, two environments, or two servers",
    "plot": "a picture of results",
}
"""Subcommands of `vllm bench`; each is the module of that name with `add_arguments` and `run`."""


def main(name: str) -> int:
    """`vllm bench NAME`, for the scripts in benchmarks/. Returns the exit code."""
    import sys

    from vllm.entrypoints.cli.main import main as vllm_main

    return vllm_main(["bench", name, *sys.argv[1:]])
