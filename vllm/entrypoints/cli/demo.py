"""Several answers of the bundled model to one prompt, side by side, with their log-probabilities."""

from __future__ import annotations

import argparse
import math
import time
from typing import TYPE_CHECKING

from vllm.engine.arg_utils import DEFAULT_MODEL
from vllm.utils.argparse_utils import FlexibleArgumentParser

if TYPE_CHECKING:
    from rich.panel import Panel
    from rich.text import Text

    from vllm import LLM, CompletionOutput, RequestOutput, SamplingParams

DEFAULT_PROMPT = "What is the best thing about autumn? Answer in two sentences."


def add_arguments(parser: FlexibleArgumentParser) -> None:
    parser.add_argument("--prompt", default=DEFAULT_PROMPT, help="What to answer (default: %(default)s)")
    parser.add_argument("-n", type=int, default=4, metavar="N", help="Answers (default: 4)")
    parser.add_argument("--max-tokens", type=int, default=96, metavar="N", help="Longest answer (default: 96)")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="X", help="Default: 0.8")
    parser.add_argument("--seed", type=int, default=None, metavar="N", help="Makes the answers repeatable")
    parser.add_argument(
        "--model", default=DEFAULT_MODEL, help="Folder, GGUF file or bundled name (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    from rich.columns import Columns
    from rich.console import Console
    from rich.markup import escape
    from rich.panel import Panel

    console = Console()
    start = time.perf_counter()
    from vllm import LLM, SamplingParams

    # Checked before a model is loaded for it.
    params = SamplingParams(
        n=args.n, max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed, logprobs=0
    )
    with console.status(f"loading {escape(args.model)}"):
        llm = LLM(model=args.model)
    ready = time.perf_counter()
    with console.status(f"{args.n} answers"):
        output = _answer(llm, args.prompt, params)
    seconds = time.perf_counter() - ready
    llm.shutdown()

    console.print(Panel(escape(_printable(args.prompt)), title="prompt", title_align="left", border_style="bold"))
    most = max(1, min(len(output.outputs), console.width // 38))
    across = math.ceil(len(output.outputs) / math.ceil(len(output.outputs) / most))  # rows of one length
    width = console.width // across - 1
    console.print(Columns([_panel(completion, width) for completion in output.outputs], padding=(0, 1, 0, 0)))
    tokens = sum(len(completion.token_ids) for completion in output.outputs)
    prompt_tokens = len(output.prompt_token_ids or ())
    console.print(
        f"{len(output.outputs)} answers, {tokens} tokens in {seconds:.2f} s: "
        f"[bold]{tokens / seconds:.0f} tokens/s[/bold]. "
        f"Prompt of {prompt_tokens} tokens, computed once. Ready after {ready - start:.1f} s.",
        highlight=False,
    )
    return 0


def _answer(llm: LLM, prompt: str, params: SamplingParams) -> RequestOutput:
    """As a chat message where the model has a template for it, else as text to go on with."""
    if llm.llm_engine.tokenizer is not None and llm.llm_engine.tokenizer.chat_template:
        return llm.chat([{"role": "user", "content": prompt}], params, use_tqdm=False)[0]
    return llm.generate(prompt, params, use_tqdm=False)[0]


def _panel(completion: CompletionOutput, width: int) -> Panel:
    from rich.panel import Panel

    tokens = len(completion.token_ids)
    total = completion.cumulative_logprob or 0.0
    mean = total / max(1, tokens)
    return Panel(
        _coloured(completion),
        width=width,
        title=f"{completion.index}: {tokens} tokens, {completion.finish_reason}",
        title_align="left",
        subtitle=f"log p {total:.1f}, mean {mean:.2f}",
        subtitle_align="left",
    )


def _coloured(completion: CompletionOutput) -> Text:
    """The text, unlikely tokens in warmer colours; left uncoloured where tokens are parts of a character."""
    from rich.text import Text

    pieces: list[tuple[str, float]] = []
    for token_id, entry in zip(completion.token_ids, completion.logprobs or (), strict=False):
        sampled = entry[token_id] if entry else None
        if sampled is not None:
            pieces.append((sampled.decoded_token or "", math.exp(sampled.logprob)))
    text = completion.text
    if not "".join(piece for piece, _ in pieces).startswith(text):
        return Text(_printable(text))
    coloured = Text()
    left = len(text)
    for piece, probability in pieces:
        style = "" if probability > 0.5 else "yellow" if probability > 0.1 else "red"
        coloured.append(_printable(piece[:left]), style)
        left -= len(piece[:left])
    return coloured


def _printable(text: str) -> str:
    """Without control characters: a model's words must not steer the terminal."""
    return "".join(
        character if character.isprintable() or character == "\n" else "\N{SYMBOL FOR SUBSTITUTE}" for character in text
    )
