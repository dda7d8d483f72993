"""Latency of one batch: the same number of prompts, over and over, each batch timed from call to return."""

from __future__ import annotations

import argparse
import random
import time
from typing import TYPE_CHECKING

from vllm.benchmarks import machine, measures, offline, results
from vllm.benchmarks.datasets import Sample
from vllm.benchmarks.throughput import offline_picture
from vllm.exceptions import BadRequestError, UnsupportedError
from vllm.utils.argparse_utils import FlexibleArgumentParser, human_int

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

PERCENTILES = (10, 25, 50, 75, 90, 99)


def add_arguments(parser: FlexibleArgumentParser) -> None:
    run = parser.add_argument_group("run")
    run.add_argument("--input-len", type=human_int, default=32, metavar="N", help="prompt tokens (default: 32)")
    run.add_argument("--output-len", type=human_int, default=128, metavar="N", help="output tokens (default: 128)")
    run.add_argument("--batch-size", type=human_int, default=8, metavar="N", help="prompts at a time (default: 8)")
    # Upstream's 10 and 30 are meant for a GPU.
    run.add_argument("--num-iters-warmup", type=int, default=1, metavar="N", help="batches before (default: 1)")
    run.add_argument("--num-iters", type=int, default=5, metavar="N", help="batches timed (default: 5)")
    run.add_argument("--use-beam-search", action="store_true", help="not built into this benchmark; refused")
    run.add_argument("--profile", action="store_true", help="not built; refused (py-spy works from outside)")
    run.add_argument("--disable-stream", action="store_true", help="leave out the batch that times each child")
    offline.add_sampling_arguments(parser)
    offline.add_result_arguments(parser)
    offline.add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    for name in ("use_beam_search", "profile"):
        if getattr(args, name):
            raise UnsupportedError(f"{name} is not built into this benchmark")
    for name, least in (
        ("input_len", 1), ("output_len", 1), ("batch_size", 1), ("num_iters", 1), ("num_iters_warmup", 0)
    ):  # fmt: skip
        if getattr(args, name) < least:
            raise BadRequestError(f"{name} must be at least {least}, got {getattr(args, name)}", name)
    from vllm import SamplingParams

    SamplingParams(n=args.n, temperature=args.temperature)
    result = results.stamp("latency")
    _measure(args, offline.engine_args(args, needs_tokenizer=False), result)
    results.show(result, f"latency of {args.batch_size} x {args.n}, {args.model}")
    print(f"Avg latency: {result['avg_latency']:.4f} seconds")
    for percent, seconds in result["percentiles"].items():
        print(f"{percent}% percentile latency: {seconds:.4f} seconds")
    if args.output_json:
        results.write(args.output_json, result)
    offline_picture(args, result)
    return 0


def _measure(args: argparse.Namespace, engine_args: EngineArgs, result: results.Result) -> None:
    from vllm import SamplingParams

    with offline.started(engine_args) as (llm, startup):
        engine = llm.llm_engine
        config = engine.vllm_config
        rng = random.Random(args.seed or 0)
        high = min(10_000, engine.model_info.vocab_size)
        size = args.input_len
        params = SamplingParams(
            n=args.n,
            temperature=args.temperature,
            top_p=1.0,
            ignore_eos=True,
            max_tokens=args.output_len,
            detokenize=not (args.disable_detokenize or engine_args.skip_tokenizer_init),
        )

        def batch() -> list[Sample]:
            """New prompts each time: the cache must not answer."""
            return [
                Sample([rng.randrange(high // 2, high) for _ in range(size)], size, args.output_len)
                for _ in range(args.batch_size)
            ]

        first = batch()
        offline.check_lengths(first, config.model.max_model_len)
        for _ in range(args.num_iters_warmup):
            llm.generate([offline.as_prompt(sample) for sample in batch()], params, use_tqdm=False)
        limits = offline.limits_for(args, config)
        latencies: list[float] = []
        counters = offline.Counters(engine)
        records = []
        for _ in range(args.num_iters):
            prompts = [offline.as_prompt(sample) for sample in batch()]
            start = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            end = time.perf_counter()
            latencies.append(end - start)
            records += offline.from_outputs(outputs, start, end)
        counts = (counters.steps, counters.prompt_tokens_computed)
        spent = sum(latencies)
        result |= {"model": args.model, "model_id": args.model, "n": args.n, "batch_size": args.batch_size}
        result |= {"input_len": size, "output_len": args.output_len, "dtype": config.model.dtype, "startup": startup}
        result |= {"quantization": config.model.quantization, "num_iters": args.num_iters}
        result |= measures.totals(records, spent)
        result |= {
            "avg_latency": spent / len(latencies),
            "latencies": latencies,
            "percentiles": {str(percent): measures.percentile(latencies, percent) for percent in PERCENTILES},
            "steps": counts[0],
            "prompt_tokens_computed": counts[1],
        }
        result |= offline.fractions(config, limits, records, counts, spent)
        if not args.disable_stream:
            streamed = offline.stream(llm, first, [params] * len(first))
            result |= measures.in_milliseconds(measures.collect(streamed))
        result["peak_memory_bytes"] = machine.peak_memory()
