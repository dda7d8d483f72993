"""A small client of a running server for the command line: streams, with the standard library only."""

from __future__ import annotations

import argparse
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from vllm import envs
from vllm.exceptions import BadRequestError, EngineError
from vllm.utils.argparse_utils import FlexibleArgumentParser

DEFAULT_URL = "http://localhost:8000/v1"


def add_client_arguments(parser: FlexibleArgumentParser) -> None:
    parser.add_argument("--url", default=DEFAULT_URL, help="The server's address (default: %(default)s)")
    parser.add_argument("--api-key", default=None, metavar="KEY", help="Default: VLLM_API_KEY")
    parser.add_argument("--model-name", default=None, metavar="NAME", help="Default: the first that the server has")
    parser.add_argument("--max-tokens", type=int, default=None, metavar="N", help="Longest answer")
    parser.add_argument("--temperature", type=float, default=None, metavar="X")
    parser.add_argument("--seed", type=int, default=None, metavar="N", help="Makes the answers repeatable")


class Client:
    """Raises EngineError where the server cannot be reached or fails, BadRequestError for what it refuses."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._url = args.url.rstrip("/")
        key = args.api_key or envs.VLLM_API_KEY
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._common = {
            name: getattr(args, name)
            for name in ("max_tokens", "temperature", "seed")
            if getattr(args, name) is not None
        }
        self.model = args.model_name or self._get("/models")["data"][0]["id"]

    def _open(self, path: str, body: dict[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, self._headers)
        if request.type not in ("http", "https"):
            raise BadRequestError(f"--url must begin with http:// or https://, got {self._url!r}", "url")
        try:
            return urllib.request.urlopen(request)
        except urllib.error.HTTPError as error:
            with error:
                raise _refusal(error) from None
        except (urllib.error.URLError, OSError) as error:
            reason = getattr(error, "reason", error)
            raise EngineError(f"no server at {self._url} ({reason}): start one with `vllm serve`") from None

    def _get(self, path: str) -> Any:
        with self._open(path, None) as response:
            return json.load(response)

    def stream(self, path: str, **body: Any) -> Iterator[dict[str, Any]]:
        """The choices of a stream, as they come."""
        with self._open(path, {"model": self.model, "stream": True, **self._common, **body}) as response:
            for line in response:
                if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                    continue
                event = json.loads(line[len(b"data: ") :])
                if "error" in event:
                    raise EngineError(event["error"]["message"])
                yield from event["choices"]


def _refusal(error: urllib.error.HTTPError) -> Exception:
    try:
        message = json.load(error)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = f"the server answered {error.code}"
    return BadRequestError(message) if 400 <= error.code < 500 else EngineError(message)


def printable(text: str) -> str:
    """Without control characters: a model's words must not steer the terminal."""
    return "".join(
        character if character.isprintable() or character in "\n\t" else "\N{SYMBOL FOR SUBSTITUTE}"
        for character in text
    )
