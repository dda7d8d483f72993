"""Flags of `vllm serve` beside the engine's own."""

from __future__ import annotations

import argparse
import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from vllm import envs
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.chat_utils import load_chat_template
from vllm.exceptions import ConfigError, UnsupportedError
from vllm.logger import init_logger, warn_once
from vllm.utils.argparse_utils import FlexibleArgumentParser, add_dataclass_arguments, option, option_rules

logger = init_logger(__name__)

ToolParserName = Literal["auto", "hermes", "llama3_json", "mistral"]
ReasoningParserName = Literal["deepseek_r1", "qwen3", "think"]


@dataclass(frozen=True)
class ServerArgs:
    """What a user may set of the server."""

    host: str | None = option(None, "server", "Address to listen on; default: 0.0.0.0, every interface.")
    port: int = option(8000, "server", "Port; 0 takes a free one, which the log names.", low=0)
    uds: str | None = option(None, "server", "Unix socket to listen on in place of host and port.")
    root_path: str = option("", "server", "Path under which a proxy shows the server.")
    ssl_keyfile: str | None = option(None, "server", "Key file for HTTPS.")
    ssl_certfile: str | None = option(None, "server", "Certificate file for HTTPS.")
    max_body_size: int = option(16 * 2**20, "server", "Largest request body in bytes; larger ones get 413.", low=1)
    max_queue_size: int = option(
        32_768, "server", "Completions (n counts) that may wait beside those that run; more get 503.", low=0
    )
    shutdown_grace: float = option(
        30.0, "server", "Seconds that requests may go on after SIGTERM before they are aborted.", low=0
    )
    restart_engine: bool = option(False, "server", "Start the engine again when it dies; else the server ends.")
    page: bool = option(True, "server", "Serve the page at /.")
    disable_fastapi_docs: bool = option(False, "server", "No /docs, /redoc and /openapi.json.")
    disable_access_log: bool = option(False, "server", "No log line per HTTP request.")
    enable_log_requests: bool = option(False, "server", "Log each request's parameters, and its prompt's beginning.")
    max_log_len: int = option(200, "server", "Most characters of a prompt in the log.", low=0)

    chat_template: str | None = option(None, "chat", "Chat template in place of the model's own: a file, or the text.")
    chat_template_content_format: Literal["auto", "string", "openai"] = option(
        "auto", "chat", "How message contents are handed to the template."
    )
    trust_request_chat_template: bool = option(False, "chat", "Let requests bring templates of their own.")
    response_role: str = option("assistant", "chat", "Role of the answers.")
    enable_auto_tool_choice: bool = option(
        False, "chat", "Accepted; tool_choice auto works wherever a form of tool calls is known."
    )
    tool_call_parser: ToolParserName = option(
        "auto", "chat", "Form in which the model writes tool calls; auto: by its chat template."
    )
    reasoning_parser: ReasoningParserName | None = option(
        None, "chat", "Form in which the model marks its reasoning; all are <think> … </think>."
    )
    return_tokens_as_token_ids: bool = option(False, "chat", "Show tokens in log-probabilities as token_id:ID.")
    enable_prompt_tokens_details: bool = option(True, "chat", "Tell in the usage how much of the prompt was cached.")
    enable_force_include_usage: bool = option(False, "chat", "Send the usage at the end of every stream.")

    api_keys: tuple[str, ...] = ()
    served_names: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field, rule in option_rules(type(self)):
            value = getattr(self, field.name)
            if value is not None and field.name != "root_path" and not rule.fits(value):
                raise ConfigError(f"{field.name} must be {rule.text}, got {value!r}", field.name)
        if self.port > 65_535:
            raise ConfigError(f"port must be at most 65535, got {self.port}", "port")
        if self.root_path and not self.root_path.startswith("/"):
            raise ConfigError(f"root_path must begin with /, got {self.root_path!r}", "root_path")
        if any(not key.strip() or not key.isprintable() for key in self.api_keys):
            raise ConfigError("api_key must not be empty", "api_key")

    def model_names(self, model: str) -> list[str]:
        """Names under which the model is served; the first is the one that answers carry."""
        return list(self.served_names) or [model]


# Flags of vLLM's server that mean nothing here. Ignoring these cannot change an answer:
_HARMLESS = {
    "uvicorn-log-level": 1, "log-config-file": 1, "api-server-count": 1, "disable-uvicorn-access-log": 0,
    "disable-log-requests": 0, "no-enable-log-requests": 0, "disable-frontend-multiprocessing": 0,
    "enable-server-load-tracking": 0, "enable-request-id-headers": 0, "enable-tokenizer-info-endpoint": 0,
    "h11-max-incomplete-event-size": 1, "h11-max-header-count": 1, "compilation-config": 1,
    "max-parallel-loading-workers": 1,
    "max-seq-len-to-capture": 1, "async-scheduling": 0, "no-async-scheduling": 0, "disable-custom-all-reduce": 0,
    "guided-decoding-backend": 1, "preemption-mode": 1, "num-scheduler-steps": 1, "use-v2-block-manager": 0,
}  # fmt: skip


class _Ignored(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, flag: str | None = None) -> None:
        del parser, namespace, values
        warn_once(logger, "%s has no effect here", flag)


def add_arguments(parser: FlexibleArgumentParser) -> None:
    """Every flag of the server and of the engine."""
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="Folder, GGUF file or bundled name")
    parser.add_argument("--config", metavar="FILE", help="YAML file of flags, without --; the command line wins")
    add_dataclass_arguments(parser, ServerArgs)
    server = next(group for group in parser._action_groups if group.title == "server")
    server.add_argument(
        "--api-key",
        action="append",  # not nargs: the model's name behind it must not become a key
        dest="api_keys",
        metavar="KEY",
        help="Key that clients need (also VLLM_API_KEY); may be given several times",
    )
    server.add_argument(
        "--allowed-origins", type=str, nargs="+", default=[], metavar="ORIGIN",
        help="Web pages that may use the server from a browser (CORS); default: none but its own",
    )  # fmt: skip
    add_dataclass_arguments(parser, AsyncEngineArgs, skip=frozenset(("served_model_name",)))
    model = next(group for group in parser._action_groups if group.title == "model")
    model.add_argument(
        "--served-model-name", nargs="+", default=[], dest="served_names", metavar="NAME",
        help="Names under which the model is served; answers carry the first",
    )  # fmt: skip
    known = parser._option_string_actions
    for name, count in _HARMLESS.items():
        if "--" + name not in known:
            parser.add_argument(
                "--" + name, action=_Ignored, nargs=count or 0, help=argparse.SUPPRESS, default=argparse.SUPPRESS
            )


def server_args(args: argparse.Namespace) -> ServerArgs:
    """Raises ConfigError."""
    names = {field.name for field, _ in option_rules(ServerArgs)}
    values = {name: getattr(args, name) for name in names}
    try:
        values["chat_template"] = load_chat_template(values["chat_template"])
    except ValueError as error:
        raise ConfigError(str(error), "chat_template") from None
    keys = args.api_keys or ([envs.VLLM_API_KEY] if envs.VLLM_API_KEY else [])
    return ServerArgs(
        **values,
        api_keys=tuple(keys),
        served_names=tuple(args.served_names),
        allowed_origins=tuple(args.allowed_origins),
    )


def engine_args(args: argparse.Namespace) -> AsyncEngineArgs:
    """Raises ConfigError and UnsupportedError."""
    if args.model_tag is not None:
        default = next(field.default for field in dataclasses.fields(AsyncEngineArgs) if field.name == "model")
        if args.model not in (default, args.model_tag):
            raise ConfigError(f"the model is given twice: {args.model_tag!r} and --model {args.model!r}", "model")
        args.model = args.model_tag
    own = AsyncEngineArgs.from_cli_args(args)
    own.served_model_name = args.served_names[0] if args.served_names else None
    return own


def with_config_file(argv: list[str]) -> list[str]:
    """`argv` with the flags of its --config file put before those that stand in it.

    Raises ConfigError for a file that cannot be read or does not hold a flat mapping.
    """
    place = next((i for i, word in enumerate(argv) if word == "--config" or word.startswith("--config=")), None)
    if place is None:
        return argv
    if "=" in argv[place]:
        name, rest = argv[place].partition("=")[2], argv[:place] + argv[place + 1 :]
    elif place + 1 < len(argv):
        name, rest = argv[place + 1], argv[:place] + argv[place + 2 :]
    else:
        raise ConfigError("--config needs a file", "config")
    flags: list[str] = []
    model: list[str] = []
    for key, value in _read_yaml(Path(name).expanduser()).items():
        flag = "--" + key.replace("_", "-")
        if key in ("model", "model_tag"):
            model = [str(value)]
        elif isinstance(value, bool):
            flags.append(flag if value else "--no-" + flag[2:])
        elif isinstance(value, list) and flag == "--api-key":
            flags += [word for entry in value for word in (flag, str(entry))]
        elif isinstance(value, list):
            flags += [flag, *map(str, value)]
        elif isinstance(value, dict):
            import json

            flags += [flag, json.dumps(value)]
        elif value is not None:
            flags += [flag, str(value)]
    if rest and not rest[0].startswith("-"):
        return [rest[0], *flags, *rest[1:]]
    return [*model, *flags, *rest]


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml  # type: ignore[import-untyped]

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path}: {error}", "config") from None
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(
        isinstance(key, str) and re.fullmatch(r"[A-Za-z][\w-]*", key) for key in values
    ):
        raise ConfigError(f"--config {path}: expected a mapping from flag names to values", "config")
    return cast("dict[str, Any]", values)


def refuse_unbuilt(args: ServerArgs) -> None:
    """What is known and cannot be honoured."""
    if bool(args.ssl_keyfile) != bool(args.ssl_certfile):
        raise ConfigError("ssl_keyfile and ssl_certfile are needed together", "ssl_keyfile")
    if args.chat_template_content_format not in ("auto", "string", "openai"):
        raise UnsupportedError(f"chat_template_content_format={args.chat_template_content_format!r} is not built here")
