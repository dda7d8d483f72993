"""The `vllm` command.

A subcommand is one module of this package. Its name (with dashes) is the command's name, its docstring the help, and it
has

    def add_arguments(parser: FlexibleArgumentParser) -> None: ...
    def run(args: argparse.Namespace) -> int: ...           # the exit code

Nothing else registers it. Modules keep heavy imports inside `run`, so that `vllm --help` stays quick.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import logging
import os
import pkgutil
import sys
from collections.abc import Sequence
from typing import Protocol, cast

import vllm.entrypoints.cli as package
from vllm.exceptions import BadRequestError, ConfigError, VLLMError
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.version import __version__


class Command(Protocol):
    """A subcommand's module."""

    __doc__: str | None

    def add_arguments(self, parser: FlexibleArgumentParser) -> None: ...
    def run(self, args: argparse.Namespace) -> int: ...


def command_names() -> list[str]:
    """The subcommands there are."""
    names = (module.name for module in pkgutil.iter_modules(package.__path__))
    return sorted(name.replace("_", "-") for name in names if name != "main" and not name.startswith("_"))


def load_command(name: str) -> Command:
    module = importlib.import_module(f"{package.__name__}.{name.replace('-', '_')}")
    return cast(Command, module)


def _usage() -> str:
    lines = ["usage: vllm COMMAND [options]", "       vllm --version", "", "commands:"]
    for name in command_names():
        summary = (load_command(name).__doc__ or "").strip().splitlines()
        lines.append(f"  {name:<14}{summary[0] if summary else ''}")
    return "\n".join([*lines, "", "vllm COMMAND --help says more."])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 0, 1 for a failure, 2 for a wrong call, 130 after Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if words else 2
    if words[0] in ("-v", "--version"):
        print(__version__)
        return 0
    name, names = words[0].replace("_", "-"), command_names()
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        print(f"vllm: no command {words[0]!r}{hint} ({', '.join(names)})", file=sys.stderr)
        return 2
    command = load_command(name)
    parser = FlexibleArgumentParser(prog=f"vllm {name}", description=command.__doc__)
    command.add_arguments(parser)
    args = parser.parse_args(words[1:])
    try:
        return command.run(args)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except VLLMError as error:
        if logging.getLogger("vllm").isEnabledFor(logging.DEBUG):
            raise
        print(f"vllm {name}: {error}", file=sys.stderr)
        return 2 if isinstance(error, (BadRequestError, ConfigError)) else 1


if __name__ == "__main__":
    sys.exit(main())
