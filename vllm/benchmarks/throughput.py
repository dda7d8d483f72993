"""Offline throughput: everything is submitted at once, and the whole is timed."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.benchmarks import datasets, machine, measures, offline, results
from vllm.exceptions import BadRequestError, UnsupportedError
from vllm.utils.argparse_utils import FlexibleArgumentParser

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.benchmarks.datasets import Sample
    from vllm.benchmarks.measures import RequestRecord
    from vllm.engine.arg_utils import EngineArgs

CPU_NUM_PROMPTS = 64
"""Upstream's 1000 are meant for a GPU."""


def add_arguments(parser: FlexibleArgumentParser) -> None:
    datasets.add_arguments(
        parser, num_prompts=CPU_NUM_PROMPTS, num_prompts_help=f"prompts (default: {CPU_NUM_PROMPTS})"
    )
    offline.add_sampling_arguments(parser)
    run = parser.add_argument_group("run")
    run.add_argument("--async-engine", action="store_true", help="AsyncLLM, streaming, in place of LLM.generate")
    run.add_argument("--stream", action="store_true", help="report every token when it is made, and time each child")
    run.add_argument("--num-warmups", type=int, default=1, metavar="N", help="prompts run before (default: 1)")
    run.add_argument("--disable-frontend-multiprocessing", action="store_true", help="accepted; there is none here")
    run.add_argument("--hf-max-batch-size", type=int, help="of another backend; refused")
    run.add_argument("--lora-path", help="not built yet; refused")
    offline.add_result_arguments(parser)
    offline.add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    for name in ("hf_max_batch_size", "lora_path"):
        if getattr(args, name) is not None:
            raise UnsupportedError(f"{name} is not built here")
    if args.num_warmups < 0:
        raise BadRequestError(f"num_warmups must be at least 0, got {args.num_warmups}", "num_warmups")
    from vllm import SamplingParams

    # Checked before a model is loaded for it.
    SamplingParams(n=args.n, temperature=args.temperature)
    needs_text = datasets.dataset_name(args) != "random"
    engine_args = offline.engine_args(args, needs_tokenizer=needs_text)
    result = results.stamp("throughput")
    if args.async_engine:
        asyncio.run(_async(args, engine_args, result))
    else:
        _sync(args, engine_args, result)
    results.show(result, f"throughput, {args.model}")
    print(
        f"Throughput: {result['request_throughput']:.2f} requests/s, "
        f"{result['total_token_throughput']:.2f} total tokens/s, {result['output_throughput']:.2f} output tokens/s"
    )
    if args.output_json:
        results.write(args.output_json, result)
    offline_picture(args, result)
    return 0


def offline_picture(args: argparse.Namespace, result: results.Result) -> None:
    if args.plot:
        from vllm.benchmarks import plots

        plots.draw([result], args.plot, [results.read(args.baseline)] if args.baseline else [])
    elif args.baseline:
        from vllm.benchmarks import compare

        compare.show_files(results.read(args.baseline), result)


def _params(args: argparse.Namespace, samples: Sequence[Sample]) -> list[SamplingParams]:
    from vllm import SamplingParams

    return [
        SamplingParams(
            n=args.n,
            temperature=args.temperature,
            top_p=1.0,
            ignore_eos=True,
            max_tokens=sample.output_len,
            detokenize=not (args.disable_detokenize or args.skip_tokenizer_init),
        )
        for sample in samples
    ]


def _samples(args: argparse.Namespace, engine: object) -> list[Sample]:
    """`engine` is an LLMEngine or an AsyncLLM."""
    samples = datasets.load(
        args,
        lambda: engine.tokenizer,  # type: ignore[attr-defined]
        seed=args.seed or 0,
        vocab_size=engine.model_info.vocab_size,  # type: ignore[attr-defined]
    )
    offline.check_lengths(samples, engine.model_config.max_model_len)  # type: ignore[attr-defined]
    return samples


def _sync(args: argparse.Namespace, engine_args: EngineArgs, result: results.Result) -> None:
    with offline.started(engine_args) as (llm, seconds):
        result["startup"] = seconds
        args.skip_tokenizer_init = engine_args.skip_tokenizer_init
        samples = _samples(args, llm.llm_engine)
        params = _params(args, samples)
        prompts = [offline.as_prompt(sample) for sample in samples]
        config = llm.llm_engine.vllm_config
        for index in range(args.num_warmups):
            llm.generate([_warm_up_prompt(index)], _short(params[0]), use_tqdm=False)
        llm.reset_prefix_cache()
        limits = offline.limits_for(args, config)
        counters = offline.Counters(llm.llm_engine)
        start = time.perf_counter()
        if args.stream:
            records = offline.stream(llm, samples, params)
            end = time.perf_counter()
        else:
            outputs = llm.generate(prompts, params)
            end = time.perf_counter()
            records = offline.from_outputs(outputs, start, end)
        _fill(args, result, records, end - start, timed=args.stream)
        if not args.stream:
            result.update(_request_times([output.metrics for output in outputs]))
        counts = (counters.steps, counters.prompt_tokens_computed)
        result |= {"steps": counts[0], "prompt_tokens_computed": counts[1], "preemptions": counters.num_preemptions}
        result |= offline.fractions(config, limits, records, counts, end - start)
        result["dtype"] = config.model.dtype
        result["peak_memory_bytes"] = machine.peak_memory()


def _request_times(metrics: Sequence[object]) -> dict[str, float]:
    """Of a `generate` call the engine's own times per request: to the first token, and to the end."""
    samples = measures.Samples()
    for own in metrics:
        first = getattr(own, "first_token_latency", 0.0)
        if first:
            samples.request_ttft.append(first)
            samples.request_e2el.append(own.last_token_ts - own.queued_ts)  # type: ignore[attr-defined]
    return measures.in_milliseconds(samples)


def _fill(
    args: argparse.Namespace, result: results.Result, records: list[RequestRecord], seconds: float, *, timed: bool
) -> None:
    result |= {"model": args.model, "model_id": args.model, "n": args.n, "num_prompts": len(records)}
    result |= {"dataset": datasets.dataset_name(args), "quantization": args.quantization}
    result |= {"input_len": args.input_len, "output_len": args.output_len, "streamed": timed}
    result |= measures.totals(records, seconds)
    # Upstream's names.
    result |= {
        "elapsed_time": seconds,
        "num_requests": len(records),
        "total_num_tokens": result["total_input_tokens"] + result["total_output_tokens"],
        "requests_per_second": result["request_throughput"],
        "tokens_per_second": result["total_token_throughput"],
    }
    if timed:
        result |= measures.in_milliseconds(measures.collect(records))


def _warm_up_prompt(index: int) -> list[int]:
    return [100 + index % 100, *range(101, 132)]


def _short(params: SamplingParams) -> SamplingParams:
    own = params.clone()
    own.n, own.max_tokens = 1, 8
    return own


async def _async(args: argparse.Namespace, engine_args: EngineArgs, result: results.Result) -> None:
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    begun = time.perf_counter()
    with AsyncLLM.from_engine_args(engine_args) as engine:
        result["startup"] = time.perf_counter() - begun
        args.skip_tokenizer_init = engine_args.skip_tokenizer_init
        samples = _samples(args, engine)
        params = _params(args, samples)

        async def one(index: int, prompt: object, own: SamplingParams, record: RequestRecord | None) -> None:
            own = own.clone()
            own.output_kind = RequestOutputKind.DELTA
            async for output in engine.generate(prompt, own, f"bench-{index}"):  # type: ignore[arg-type]
                if record is not None:
                    offline.note(record, output, time.perf_counter())

        for index in range(args.num_warmups):
            await one(-1 - index, _warm_up_prompt(index), _short(params[0]), None)
        await engine.reset_prefix_cache()
        limits = offline.limits_for(args, engine.vllm_config)
        counters = offline.Counters(engine)
        start = time.perf_counter()
        records = [measures.RequestRecord(i, sample.prompt_len, start) for i, sample in enumerate(samples)]
        await asyncio.gather(
            *(one(i, offline.as_prompt(samples[i]), params[i], record) for i, record in enumerate(records))
        )
        seconds = time.perf_counter() - start
        _fill(args, result, records, seconds, timed=True)
        counts = (counters.steps, counters.prompt_tokens_computed)
        result |= {"steps": counts[0], "prompt_tokens_computed": counts[1], "preemptions": counters.num_preemptions}
        result |= offline.fractions(engine.vllm_config, limits, records, counts, seconds)
        result["dtype"] = engine.vllm_config.model.dtype
        result["peak_memory_bytes"] = machine.peak_memory()
