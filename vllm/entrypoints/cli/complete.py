"""Completions of a prompt by a running server, `-n` of them side by side."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from vllm.entrypoints.cli._client import Client, add_client_arguments, printable
from vllm.utils.argparse_utils import FlexibleArgumentParser

if TYPE_CHECKING:
    from rich.console import Group


def add_arguments(parser: FlexibleArgumentParser) -> None:
    add_client_arguments(parser)
    parser.add_argument("-n", type=int, default=1, metavar="N", help="Completions (default: 1)")
    parser.add_argument("-q", "--quick", default=None, metavar="TEXT", help="The prompt; default: the standard input")


def run(args: argparse.Namespace) -> int:
    client = Client(args)
    prompt = sys.stdin.read() if args.quick is None else args.quick
    stream = client.stream("/completions", prompt=prompt, n=args.n)
    if args.n == 1 or not sys.stdout.isatty():
        texts: dict[int, list[str]] = {index: [] for index in range(args.n)}
        for choice in stream:
            texts[choice["index"]].append(choice["text"])
            if args.n == 1:
                print(printable(choice["text"]), end="", flush=True)
        if args.n == 1:
            print()
        else:
            for index, pieces in texts.items():
                print(f"--- {index}\n{printable(''.join(pieces))}")
        return 0
    from rich.live import Live

    shown = [""] * args.n
    with Live(_panels(shown), refresh_per_second=12) as live:
        for choice in stream:
            shown[choice["index"]] += printable(choice["text"])
            live.update(_panels(shown))
    return 0


def _panels(texts: list[str]) -> Group:
    from rich.columns import Columns
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    return Group(Columns([Panel(Text(text), title=str(i), width=48) for i, text in enumerate(texts)]))
