"""A picture of result files: throughput against n, or latency against request rate, with a baseline beside it."""

from __future__ import annotations

import argparse

from vllm.benchmarks import plots, results
from vllm.utils.argparse_utils import FlexibleArgumentParser


def add_arguments(parser: FlexibleArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE", help="results of one kind, one per point")
    parser.add_argument("--baseline", nargs="+", default=[], metavar="FILE", help="earlier results")
    parser.add_argument("--output", "-o", required=True, metavar="FILE", help="png, svg or pdf")


def run(args: argparse.Namespace) -> int:
    plots.draw([results.read(file) for file in args.files], args.output, [results.read(file) for file in args.baseline])
    print(args.output)
    return 0
