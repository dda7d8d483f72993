"""Measure: throughput, latency, a server under load; compare and draw results.

The same programs stand in benchmarks/ under upstream's names (benchmark_throughput.py and so on).
"""

from __future__ import annotations

import argparse
import importlib

from vllm.benchmarks import BENCHMARKS
from vllm.utils.argparse_utils import FlexibleArgumentParser


def add_arguments(parser: FlexibleArgumentParser) -> None:
    commands = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    for name, summary in BENCHMARKS.items():
        module = importlib.import_module(f"vllm.benchmarks.{name}")
        own = commands.add_parser(name, help=summary, description=module.__doc__)
        module.add_arguments(own)


def run(args: argparse.Namespace) -> int:
    module = importlib.import_module(f"vllm.benchmarks.{args.benchmark}")
    code: int = module.run(args)
    return code
