"""An OpenAI-compatible server."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from vllm.exceptions import BackendUnavailableError, ConfigError
from vllm.utils.argparse_utils import FlexibleArgumentParser


def add_arguments(parser: FlexibleArgumentParser) -> None:
    from vllm.entrypoints.openai import server_args

    server_args.add_arguments(parser)
    parse = parser.parse_known_args

    def with_file(args: Any = None, namespace: Any = None) -> Any:
        try:
            return parse(server_args.with_config_file(sys.argv[1:] if args is None else list(args)), namespace)
        except ConfigError as error:
            parser.error(str(error))

    parser.parse_known_args = with_file  # type: ignore[method-assign]


def run(args: argparse.Namespace) -> int:
    from vllm.entrypoints.openai.server_args import engine_args, server_args

    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise BackendUnavailableError(
            f"the server needs fastapi and uvicorn: pip install 'vllm[server]' ({error})"
        ) from None
    own = server_args(args)
    config = engine_args(args).create_engine_config()
    from vllm.entrypoints.openai.launcher import run_server

    return run_server(config, own)
