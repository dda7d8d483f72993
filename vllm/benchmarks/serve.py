"""An OpenAI-compatible server under load: requests arrive at a rate, every token is timed.

Ends with exit code 1 if any request failed; what was measured until then is shown and saved all the same.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import re
import signal
import threading
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from vllm.benchmarks import datasets, http_client, machine, measures, results
from vllm.benchmarks.datasets import Sample
from vllm.benchmarks.measures import RequestRecord
from vllm.benchmarks.offline import say
from vllm.exceptions import BadRequestError, ModelLoadError, UnsupportedError
from vllm.utils.argparse_utils import FlexibleArgumentParser, human_int, json_object

if TYPE_CHECKING:
    import aiohttp

    from vllm.model_executor.spec import DecoderSpec
    from vllm.tokenizers import Tokenizer

DEFAULT_NUM_PROMPTS = 1000
"""Or all that the data set has, if that is fewer."""
_COUNTER = re.compile(r"^vllm:(prompt_tokens_computed|engine_steps)_total(?:\{[^}]*\})?\s+([0-9.eE+]+)$", re.MULTILINE)


def add_arguments(parser: FlexibleArgumentParser) -> None:
    server = parser.add_argument_group("server")
    server.add_argument(
        "--backend", "--endpoint-type", default="vllm", choices=("vllm", "openai", "openai-chat"),
        help="vllm and openai: completions; openai-chat: chat completions (default: vllm)",
    )  # fmt: skip
    server.add_argument("--base-url", metavar="URL", help="in place of --host and --port")
    server.add_argument("--host", default="127.0.0.1")
    server.add_argument("--port", type=int, default=8000)
    server.add_argument("--endpoint", metavar="PATH", help="default: /v1/completions or /v1/chat/completions")
    server.add_argument("--header", nargs="*", default=[], metavar="KEY=VALUE", help="sent with every request")
    server.add_argument("--model", help="default: the first that the server lists")
    server.add_argument("--served-model-name", metavar="NAME", help="the server's name of it, if another")
    server.add_argument("--tokenizer", help="measures texts (default: the model's, where it is on this machine)")
    server.add_argument("--tokenizer-mode", default="auto", choices=("auto", "hf"))
    server.add_argument("--trust-remote-code", action="store_true", help="accepted; code is never run")
    server.add_argument(
        "--ready-check-timeout-sec", type=float, default=0.0, metavar="S", help="wait for the server (default: 0)"
    )
    server.add_argument("--request-timeout-sec", type=float, default=6 * 3600.0, metavar="S", help="default: 6 hours")
    datasets.add_arguments(
        parser,
        num_prompts=None,
        num_prompts_help=f"requests (default: {DEFAULT_NUM_PROMPTS}, or all of a smaller data set)",
    )
    load = parser.add_argument_group("load")
    load.add_argument(
        "--request-rate", type=float, default=math.inf, metavar="R", help="requests/s (default: inf, all at once)"
    )
    load.add_argument(
        "--burstiness", type=float, default=1.0, metavar="B",
        help="shape of the gamma distribution of the gaps: 1 Poisson, lower is burstier (default: 1)",
    )  # fmt: skip
    load.add_argument("--max-concurrency", type=human_int, metavar="N", help="most requests at a time")
    load.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and gaps (default: 0)")
    load.add_argument("--num-warmups", type=int, default=1, metavar="N", help="requests before (default: 1)")
    load.add_argument("--skip-initial-test", action="store_true", help="no warm-up")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--n", type=human_int, default=1, metavar="N", help="completions per prompt (default: 1)")
    sampling.add_argument("--ignore-eos", action="store_true", help="always --output-len tokens")
    sampling.add_argument("--logprobs", type=int, metavar="N", help="ask for log-probabilities")
    for name in ("temperature", "top-p", "min-p"):
        sampling.add_argument(f"--{name}", type=float, metavar="X", help="default: the server's")
    sampling.add_argument("--top-k", type=int, metavar="N", help="default: the server's")
    sampling.add_argument("--extra-body", type=json_object, default={}, metavar="JSON", help="more fields of requests")
    sampling.add_argument("--use-beam-search", action="store_true", help="not built; refused")
    shown = parser.add_argument_group("result")
    shown.add_argument("--percentile-metrics", default="ttft,tpot,itl,e2el", metavar="NAMES", help="shown in the table")
    shown.add_argument("--metric-percentiles", default="90,99", metavar="P,P", help="default: 90,99")
    shown.add_argument("--goodput", nargs="+", default=[], metavar="NAME:MS", help="limits: ttft, tpot, e2el")
    shown.add_argument("--save-result", action="store_true", help="write a JSON file")
    shown.add_argument("--save-detailed", action="store_true", help="with every request in it")
    shown.add_argument("--append-result", action="store_true", help="one result per line of the file")
    shown.add_argument("--metadata", nargs="*", default=[], metavar="KEY=VALUE", help="kept in the file")
    shown.add_argument("--result-dir", default=".", metavar="DIR")
    shown.add_argument("--result-filename", metavar="FILE", help="default: backend-rate-model-date.json")
    shown.add_argument("--plot", metavar="FILE", help="draw it to this file (needs matplotlib)")
    shown.add_argument("--baseline", metavar="FILE", help="an earlier result, drawn or compared beside this one")
    shown.add_argument("--disable-limits", action="store_true", help="do not measure what the machine can do")
    shown.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    shown.add_argument("--profile", action="store_true", help="not built; refused")


def run(args: argparse.Namespace) -> int:
    check(args)
    result = asyncio.run(measure(args))
    return report(args, result)


def check(args: argparse.Namespace) -> None:
    """Raise for flags that make no sense, before anything is sent."""
    for name in ("use_beam_search", "profile"):
        if getattr(args, name):
            raise UnsupportedError(f"{name} is not built into this benchmark")
    for name in ("request_rate", "burstiness"):
        if not getattr(args, name) > 0:
            raise BadRequestError(f"{name} must be above 0, got {getattr(args, name):g}", name)
    for name, least in (("n", 1), ("num_warmups", 0), ("max_concurrency", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise BadRequestError(f"{name} must be at least {least}, got {value}", name)
    measures.parse_goodput(args.goodput)
    percentiles(args)
    known = {name for name, _ in results.TIMES}
    unknown = [name for name in args.percentile_metrics.split(",") if name not in known]
    if unknown:
        raise BadRequestError(f"percentile_metrics: {unknown[0]!r} is not one of {', '.join(known)}")
    _pairs(args.header, "header")
    _pairs(args.metadata, "metadata")


def percentiles(args: argparse.Namespace) -> list[float]:
    try:
        values = [float(word) for word in str(args.metric_percentiles).split(",")]
    except ValueError:
        values = [math.nan]
    if not all(0 <= value <= 100 for value in values):
        raise BadRequestError(
            f"metric_percentiles must be numbers from 0 to 100 with commas between, got {args.metric_percentiles!r}",
            "metric_percentiles",
        )
    return values


def _pairs(words: Sequence[str], name: str) -> dict[str, str]:
    for word in words:
        if "=" not in word:
            raise BadRequestError(f"{name} must be KEY=VALUE, got {word!r}", name)
    return dict(word.split("=", 1) for word in words)


def base_url(args: argparse.Namespace) -> str:
    if args.base_url:
        return str(args.base_url).rstrip("/")
    host = f"[{args.host}]" if ":" in args.host else args.host
    return f"http://{host}:{args.port}"


async def measure(args: argparse.Namespace) -> results.Result:
    """Everything but the showing. Raises BadRequestError where not even the first request can be made."""
    headers = _pairs(args.header, "header")
    key = os.environ.get("OPENAI_API_KEY")
    if key and not any(name.lower() == "authorization" for name in headers):
        headers["Authorization"] = f"Bearer {key}"
    async with http_client.client(headers, args.request_timeout_sec) as session:
        base = base_url(args)
        served = args.served_model_name or args.model or await _first_model(session, args, base)
        if args.model is None:
            args.model = served
        samples = _samples(args)
        chat = args.backend == "openai-chat"
        url = base + (args.endpoint or ("/v1/chat/completions" if chat else "/v1/completions"))
        bodies = [_body(args, served, sample, chat=chat) for sample in samples]
        if not args.skip_initial_test:
            await _warm_up(session, args, url, _body(args, served, _unlike(samples[0]), chat=chat), chat=chat)
        limits = await _limits(session, args, base)
        before = await _counters(session, base)
        load = _Load(args, session, url, bodies, samples, chat=chat)
        await load.run()
        after = await _counters(session, base)
        result = results.stamp("serve")
        result["peak_memory_bytes"] = _peak_memory(base)
    result |= {
        "backend": args.backend,
        "base_url": base,
        "model": args.model,
        "model_id": args.model,
        "tokenizer_id": args.tokenizer or args.model,
        "dataset": datasets.dataset_name(args),
        "num_prompts": len(samples),
        "n": args.n,
        "request_rate": args.request_rate if math.isfinite(args.request_rate) else "inf",
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        **_pairs(args.metadata, "metadata"),
    }
    records = load.records
    result |= measures.totals(records, load.duration)
    result["failed"] = len(samples) - result["completed"]
    result["max_concurrent_requests"] = load.most
    counted = {name: after[name] - value for name, value in before.items() if after.get(name, -1) >= value}
    if "prompt_tokens_computed" in counted:
        result["prompt_tokens_computed"] = counted["prompt_tokens_computed"]
    if "engine_steps" in counted:
        result["steps"] = counted["engine_steps"]
        if limits is not None and "prompt_tokens_computed" in result:
            result |= limits.fractions(records, result["steps"], result["prompt_tokens_computed"], load.duration)
    goodput = measures.parse_goodput(args.goodput)
    if goodput:
        result["goodput_limits"] = goodput
        result["request_goodput"] = measures.count_good(records, goodput) / load.duration if load.duration else 0.0
    result |= measures.in_milliseconds(measures.collect(records), percentiles(args))
    if load.interrupted:
        result["interrupted"] = True
    errors = [record.error for record in records if record.error is not None]
    result["errors"] = {text: errors.count(text) for text in sorted(set(errors))}
    if args.save_detailed:
        result["requests"] = [_detail(record, load.begun) for record in records]
    return result


def report(args: argparse.Namespace, result: results.Result) -> int:
    """Show, save, draw; the exit code."""
    shown = {name: value for name, value in result.items() if not name.endswith("_ms") or _is_shown(args, name)}
    results.show(shown, f"serving {result['model']} at {result['request_rate']} requests/s")
    for text, count in result["errors"].items():
        say(f"vllm bench serve: {count} of {result['num_prompts']} requests failed: {text}")
    if args.save_result or args.append_result or args.save_detailed or args.result_filename:
        path = Path(args.result_dir) / (args.result_filename or _file_name(result))
        results.write(path, result, append=args.append_result)
        say(f"result: {path}")
    if args.plot:
        from vllm.benchmarks import plots

        plots.draw([result], args.plot, [results.read(args.baseline)] if args.baseline else [])
    elif args.baseline:
        from vllm.benchmarks import compare

        compare.show_files(results.read(args.baseline), result)
    return 130 if result.get("interrupted") else 1 if result["failed"] else 0


def _is_shown(args: argparse.Namespace, name: str) -> bool:
    measure_name = name.removesuffix("_ms").partition("_")[2]
    names = args.percentile_metrics.split(",")
    return measure_name in names or (args.n > 1 and measure_name in ("first_child", "last_child", "child_spread"))


def _file_name(result: results.Result) -> str:
    model = str(result["model"]).rstrip("/").rsplit("/", 1)[-1]
    when = time.strftime("%Y%m%d-%H%M%S")
    return f"{result['backend']}-{result['request_rate']}qps-{model}-{when}.json"


async def _first_model(session: aiohttp.ClientSession, args: argparse.Namespace, base: str) -> str:
    deadline = time.monotonic() + args.ready_check_timeout_sec
    while True:
        text = await http_client.get_text(session, base + "/v1/models")
        if text is not None:
            with contextlib.suppress(ValueError, KeyError, IndexError, TypeError):
                return str(json.loads(text)["data"][0]["id"])
        if time.monotonic() >= deadline:
            raise BadRequestError(f"{base}/v1/models lists no model; is the server up? (--model names one)", "model")
        await asyncio.sleep(0.5)


def _samples(args: argparse.Namespace) -> list[Sample]:
    def tokenizer() -> Tokenizer | None:
        from vllm.tokenizers import open_tokenizer

        try:
            return open_tokenizer(args.tokenizer or args.model)
        except ModelLoadError as error:
            raise BadRequestError(f"no tokenizer to measure prompts with: {error} (--tokenizer names one)") from None

    samples = datasets.load(args, tokenizer, seed=args.seed, as_text=True)
    return samples[:DEFAULT_NUM_PROMPTS] if args.num_prompts is None else samples


def _body(args: argparse.Namespace, model: str, sample: Sample, *, chat: bool) -> dict[str, Any]:
    body: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    if chat:
        body |= {"messages": [{"role": "user", "content": sample.prompt}], "max_completion_tokens": sample.output_len}
    else:
        body |= {"prompt": sample.prompt, "max_tokens": sample.output_len}
    if args.n != 1:
        body["n"] = args.n
    if args.ignore_eos or datasets.dataset_name(args) == "random":
        body["ignore_eos"] = True
    if args.logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": args.logprobs} if chat else {"logprobs": args.logprobs}
    for name in ("temperature", "top_p", "min_p", "top_k"):
        if getattr(args, name) is not None:
            body[name] = getattr(args, name)
    extra: dict[str, Any] = args.extra_body
    return body | extra


def _unlike(sample: Sample) -> Sample:
    """About as long, but with another beginning: the server's cache must not know the run's prompts."""
    words = str(sample.prompt).split()
    return Sample("Warm-up: " + " ".join(reversed(words)), sample.prompt_len, sample.output_len)


async def _warm_up(
    session: aiohttp.ClientSession, args: argparse.Namespace, url: str, body: dict[str, Any], *, chat: bool
) -> None:
    """The first request tells whether the server takes such requests at all. Raises BadRequestError if not."""
    deadline = time.monotonic() + args.ready_check_timeout_sec
    for _ in range(max(1, args.num_warmups)):
        while True:
            record = RequestRecord(-1, 0)
            await http_client.post_streaming(session, url, body, record, chat=chat)
            if record.error is None:
                break
            if time.monotonic() >= deadline or record.error.startswith("HTTP 4"):
                hint = "" if args.ready_check_timeout_sec else " (--ready-check-timeout-sec waits for a server)"
                hint = "" if record.error.startswith("HTTP") else hint
                raise BadRequestError(f"{url} refuses the first request: {record.error}{hint}")
            await asyncio.sleep(0.5)


async def _counters(session: aiohttp.ClientSession, base: str) -> dict[str, int]:
    """What the server counts, where it tells."""
    text = await http_client.get_text(session, base + "/metrics")
    counts: dict[str, int] = {}
    for name, value in _COUNTER.findall(text or ""):
        counts[name] = counts.get(name, 0) + int(float(value))
    return counts


def _is_local(base: str) -> bool:
    return urlsplit(base).hostname in ("127.0.0.1", "localhost", "::1")


def _peak_memory(base: str) -> int | None:
    """Of the server's processes, where they run on this machine."""
    place = urlsplit(base)
    port = place.port or (443 if place.scheme == "https" else 80)
    process = machine.listener(port) if _is_local(base) else None
    return None if process is None else machine.peak_memory(process)


class _LocalLimits:
    """This machine's limits, and the model that a server on it runs."""

    def __init__(self, spec: DecoderSpec, dtype: str, quantization: str | None) -> None:
        self._spec = spec
        self._dtype = dtype
        self._quantization = quantization
        self._limits = machine.measure_limits(dtype)

    def fractions(
        self, records: Sequence[RequestRecord], steps: int, computed: int, seconds: float
    ) -> dict[str, float]:
        needed = machine.need(
            self._spec, self._dtype, self._quantization, records, steps=steps, prompt_tokens_computed=computed
        )
        return needed.fractions(self._limits, seconds)


async def _limits(session: aiohttp.ClientSession, args: argparse.Namespace, base: str) -> _LocalLimits | None:
    """None for a server elsewhere, one that does not say what it runs, or with a model that is not on this machine."""
    if args.disable_limits or not _is_local(base):
        return None
    from vllm.exceptions import VLLMError
    from vllm.model_executor.loader import open_checkpoint, resolve_model

    try:
        info = json.loads(await http_client.get_text(session, base + "/server_info") or "{}")
        path = resolve_model(info["model"])
        with open_checkpoint(path, "dummy") as checkpoint:  # the description alone
            return _LocalLimits(checkpoint.spec, info["dtype"], info.get("quantization"))
    except (VLLMError, ValueError, KeyError, TypeError):
        return None


def _detail(record: RequestRecord, begun: float) -> dict[str, Any]:
    return {
        "index": record.index,
        "start": record.start - begun,
        "prompt_tokens": record.prompt_tokens,
        "error": record.error,
        "children": [
            {
                "index": index,
                "tokens": child.tokens,
                "finish_reason": child.finish_reason,
                "text": child.text,
                "arrivals": [moment - record.start for moment in child.arrivals],
            }
            for index, child in sorted(record.children.items())
        ],
    }


class _Load:
    """The requests of a run, sent at their times."""

    def __init__(
        self,
        args: argparse.Namespace,
        session: aiohttp.ClientSession,
        url: str,
        bodies: Sequence[dict[str, Any]],
        samples: Sequence[Sample],
        *,
        chat: bool,
    ) -> None:
        self._args = args
        self._session = session
        self._url = url
        self._bodies = bodies
        self._chat = chat
        self._samples = samples
        self.records: list[RequestRecord] = []
        """Of the requests sent so far."""
        self.begun = self.duration = 0.0
        self.interrupted = False
        self._live = self.most = 0
        self._room = asyncio.Semaphore(args.max_concurrency or len(bodies))

    async def run(self) -> None:
        """Send all and wait for all. Ctrl-C ends it early, with what there is."""
        bar = _bar(self._args, len(self._bodies))
        tasks: list[asyncio.Task[None]] = []
        self.begun = time.perf_counter()
        current = asyncio.current_task()
        main = threading.current_thread() is threading.main_thread()
        if main and current is not None:  # asyncio.run turns Ctrl-C into a cancellation only since Python 3.11
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, current.cancel)
        try:
            rate, burstiness = self._args.request_rate, self._args.burstiness
            async for index in arrivals(len(self._bodies), rate, burstiness, self._args.seed):
                tasks.append(asyncio.create_task(self._one(index, bar)))  # noqa: PERF401 - each starts at its time
            await asyncio.gather(*tasks)
        except asyncio.CancelledError:
            self.interrupted = True
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for record in self.records:
                if record.error is None and any(child.finish_reason is None for child in record.children.values()):
                    record.error = "interrupted"
        finally:
            if main:
                asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
            self.duration = time.perf_counter() - self.begun
            if bar is not None:
                bar.close()

    async def _one(self, index: int, bar: Any) -> None:
        async with self._room:
            record = RequestRecord(index, self._samples[index].prompt_len)
            self.records.append(record)
            self._live += 1
            self.most = max(self.most, self._live)
            try:
                await http_client.post_streaming(
                    self._session, self._url, self._bodies[index], record, chat=self._chat
                )  # fmt: skip
            finally:
                self._live -= 1
            if bar is not None:
                bar.update(1)


async def arrivals(count: int, rate: float, burstiness: float, seed: int) -> AsyncIterator[int]:
    """0 .. count - 1, each at its time: gaps are gamma-distributed with mean 1/rate. Times are absolute, so that a late
    one does not delay those after it."""
    rng = random.Random(seed)
    due = time.perf_counter()
    for index in range(count):
        if index and math.isfinite(rate):
            due += rng.gammavariate(burstiness, 1 / (rate * burstiness))
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
        yield index


def _bar(args: argparse.Namespace, count: int) -> Any:
    if args.disable_tqdm:
        return None
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    return tqdm(total=count)
