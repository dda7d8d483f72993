"""A conversation with a running server.

Ctrl-D (or an empty line twice) ends it, Ctrl-C stops an answer.
"""

from __future__ import annotations

import argparse
import sys

from vllm.entrypoints.cli._client import Client, add_client_arguments, printable
from vllm.utils.argparse_utils import FlexibleArgumentParser


def add_arguments(parser: FlexibleArgumentParser) -> None:
    add_client_arguments(parser)
    parser.add_argument("--system-prompt", default=None, metavar="TEXT", help="What the model is told first")
    parser.add_argument("-q", "--quick", default=None, metavar="TEXT", help="One message, its answer, and the end")


def run(args: argparse.Namespace) -> int:
    client = Client(args)
    messages = [{"role": "system", "content": args.system_prompt}] if args.system_prompt else []
    if args.quick is not None:
        _answer(client, [*messages, {"role": "user", "content": args.quick}])
        return 0
    print(f"{client.model}; Ctrl-D ends the conversation.", file=sys.stderr)
    while True:
        try:
            text = input("> ")
        except EOFError:
            print()
            return 0
        if not text.strip():
            continue
        messages.append({"role": "user", "content": text})
        messages.append({"role": "assistant", "content": _answer(client, messages)})


def _answer(client: Client, messages: list[dict[str, str]]) -> str:
    """Print an answer while it comes. Ctrl-C stops it; what has come is kept."""
    pieces: list[str] = []
    try:
        for choice in client.stream("/chat/completions", messages=messages):
            piece = choice["delta"].get("content") or ""
            pieces.append(piece)
            print(printable(piece), end="", flush=True)
    except KeyboardInterrupt:
        print(" …", end="")
    print()
    return "".join(pieces)
