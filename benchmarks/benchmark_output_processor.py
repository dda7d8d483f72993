#!/usr/bin/env python3
"""Cost of the output layer alone: µs per token by kind, for requests x n, and of the n=1 seam against none.

    python benchmarks/benchmark_output_processor.py [--model smollm2-135m-instruct] [--output-len 128] [--json FILE]

The core is played by prepared messages, one per step, as it would send them: every child gets a token in every step,
and a FINAL_ONLY child is reported once, when it ends. Times are CPU times, the smallest of --repeats runs. The
seam is compared with two twins of the layer that know no `SamplingRequest`: one makes a request's output in a method,
as a layer for n=1 alone would, one in the loop itself, without any call. They run in turn; the median ratio is quoted.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.tokenizers import Tokenizer, open_tokenizer
from vllm.v1.engine.output_processor import OutputProcessor, Processed
from vllm.v1.engine.parallel_sampling import Submission
from vllm.v1.messages import EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.metrics.stats import IterationStats

SHAPES = ((64, 1), (16, 4), (1, 64), (256, 1), (4, 64))
KINDS = (RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE)
PROMPT_LEN = 32
SEAM_REQUESTS = 64


def submissions(requests: int, n: int, kind: RequestOutputKind, output_len: int) -> list[Submission]:
    params = SamplingParams(n=n, max_tokens=output_len, output_kind=kind, ignore_eos=True)
    prompt = list(range(100, 100 + PROMPT_LEN))
    return [
        Submission(
            str(index),
            None,
            params,
            kind,
            EngineCoreRequest([], np.array(prompt, np.int32), params, 0.0, kind is not RequestOutputKind.FINAL_ONLY),
        )
        for index in range(requests)
    ]


def messages(children: int, output_len: int, kind: RequestOutputKind, tokens: np.ndarray) -> list[EngineCoreOutputs]:
    """What the core would send to children with handles 1 .. `children`."""
    handles = np.arange(1, children + 1, dtype=np.int64)
    zeros, none = np.zeros(children, np.int32), np.full(children, -1, np.int64)
    whole = kind is RequestOutputKind.FINAL_ONLY
    steps = 1 if whole else output_len
    per_step = output_len if whole else 1
    offsets = np.arange(children + 1, dtype=np.int32) * per_step
    table = tokens[: children * output_len].reshape(children, output_len)
    sent = []
    for step in range(steps):
        ends = step == steps - 1
        reasons = np.full(children, FinishReason.LENGTH if ends else FinishReason.NONE, np.uint8)
        columns = np.ascontiguousarray(table if whole else table[:, step]).ravel()
        sent.append(
            EngineCoreOutputs(handles, offsets, columns, reasons, none, zeros, new_tokens=children, timestamp=1.0)
        )
    return sent


def run(
    make: Callable[[], OutputProcessor], requests: int, n: int, kind: RequestOutputKind, steps: list[EngineCoreOutputs],
    output_len: int,
) -> float:  # fmt: skip
    """µs per token of one run."""
    processor = make()
    for submission in submissions(requests, n, kind, output_len):
        processor.add(submission)
    gc.collect()
    start = time.process_time()
    count = 0
    for message in steps:
        for output in processor.process(message).outputs:
            for completion in output.outputs:
                count += len(completion.text) > 0 and len(completion.token_ids) > 0
    elapsed = time.process_time() - start
    processor.check_idle()
    assert count
    return elapsed / (requests * n * output_len) * 1e6


class MethodProcessor(OutputProcessor):
    """No seam: the processor makes a request's output in a method of its own, as a layer for n=1 alone would."""

    def process(self, message: EngineCoreOutputs, step_ends: bool = True) -> Processed:  # noqa: ARG002
        outputs: list[RequestOutput] = []
        children = self._children
        tokens = message.token_ids.tolist()
        stats = IterationStats(message.timestamp, message.new_tokens)
        stops: list[int] = []
        errors = message.errors
        reader = None
        start = ended = 0
        for handle, end, reason, stop, num_cached in zip(
            message.handles.tolist(),
            message.offsets[1:].tolist(),
            message.finish_reasons.tolist(),
            message.stop_reasons.tolist(),
            message.num_cached_tokens.tolist(),
            strict=True,
        ):
            first, start = start, end
            if reason:
                ended += 1
            child = children.get(handle)
            if child is None:
                continue
            request: Any = child.request
            if errors and handle in errors:
                stop = request.error = errors[handle]
            request.num_cached_tokens = num_cached
            completion = child.advance(tokens[first:end], first, reason, stop, reader)
            if completion is None:
                continue
            if completion.finish_reason is not None:
                del children[handle]
                if not reason:
                    stops.append(handle)
                self._child_ended(child, completion.finish_reason, message, ended - 1, stats)
            output = self._make_output(request, completion)
            if request.sink is None and not output.finished:
                outputs.append(output)
            else:
                self._emit(request, output, outputs, stats)
        return Processed(outputs, stops, [], stats)

    def _make_output(self, request: Any, completion: CompletionOutput) -> RequestOutput:
        if completion.finish_reason is None:
            output = RequestOutput(
                request.request_id, request._prompt, request.prompt_token_ids, request.prompt_logprobs, [completion],
                False, None, request.lora_request, request.num_cached_tokens,
            )  # fmt: skip
        else:
            request.finished = True
            output = RequestOutput(
                request.request_id, request._prompt, request.prompt_token_ids, request.prompt_logprobs, [completion],
                True, request.times.snapshot(), request.lora_request, request.num_cached_tokens,
            )  # fmt: skip
        if request._delta:
            request.prompt_logprobs = None
        return output


class InlineProcessor(OutputProcessor):
    """No seam, and no call: what `SingularSamplingRequest.collect` does is written out in the loop."""

    def process(self, message: EngineCoreOutputs, step_ends: bool = True) -> Processed:  # noqa: ARG002
        outputs: list[RequestOutput] = []
        children = self._children
        tokens = message.token_ids.tolist()
        stats = IterationStats(message.timestamp, message.new_tokens)
        stops: list[int] = []
        errors = message.errors
        reader = None
        start = ended = 0
        for handle, end, reason, stop, num_cached in zip(
            message.handles.tolist(),
            message.offsets[1:].tolist(),
            message.finish_reasons.tolist(),
            message.stop_reasons.tolist(),
            message.num_cached_tokens.tolist(),
            strict=True,
        ):
            first, start = start, end
            if reason:
                ended += 1
            child = children.get(handle)
            if child is None:
                continue
            request: Any = child.request
            if errors and handle in errors:
                stop = request.error = errors[handle]
            request.num_cached_tokens = num_cached
            completion = child.advance(tokens[first:end], first, reason, stop, reader)
            if completion is None:
                continue
            if completion.finish_reason is not None:
                del children[handle]
                if not reason:
                    stops.append(handle)
                self._child_ended(child, completion.finish_reason, message, ended - 1, stats)
                request.finished = True
                output = RequestOutput(
                    request.request_id, request._prompt, request.prompt_token_ids, request.prompt_logprobs,
                    [completion], True, request.times.snapshot(), request.lora_request, request.num_cached_tokens,
                )  # fmt: skip
            else:
                output = RequestOutput(
                    request.request_id, request._prompt, request.prompt_token_ids, request.prompt_logprobs,
                    [completion], False, None, request.lora_request, request.num_cached_tokens,
                )  # fmt: skip
            if request._delta:
                request.prompt_logprobs = None
            if request.sink is None and not output.finished:
                outputs.append(output)
            else:
                self._emit(request, output, outputs, stats)
        return Processed(outputs, stops, [], stats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="whose tokenizer is used")
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", help="write the figures to this file too")
    args = parser.parse_args()
    if args.output_len < 1 or args.repeats < 1:
        parser.error("--output-len and --repeats must be at least 1")

    tokenizer: Tokenizer = open_tokenizer(args.model)
    largest = max(SEAM_REQUESTS, *(requests * n for requests, n in SHAPES))
    rng = np.random.default_rng(1)
    tokens = rng.integers(100, min(40_000, tokenizer.vocab_size), largest * args.output_len).astype(np.int32)
    results: dict[str, dict[str, float]] = {}
    print(f"µs per token, {args.output_len} output tokens, {args.model}")
    print(f"{'requests x n':<14}" + "".join(f"{kind.name:>12}" for kind in KINDS))
    for requests, n in SHAPES:
        row: dict[str, float] = {}
        for kind in KINDS:
            steps = messages(requests * n, args.output_len, kind, tokens)
            times = [
                run(lambda: OutputProcessor(tokenizer), requests, n, kind, steps, args.output_len)
                for _ in range(args.repeats)
            ]
            row[kind.name] = min(times)
        results[f"{requests}x{n}"] = row
        print(f"{f'{requests}x{n}':<14}" + "".join(f"{row[kind.name]:12.3f}" for kind in KINDS), flush=True)

    print(
        f"\nn=1 through SingularSamplingRequest ({SEAM_REQUESTS}x1), time against the same layer without it\n"
        f"{'':<14}{'a method in its place':>24}{'written out in the loop':>26}"
    )
    seam: dict[str, dict[str, float]] = {}
    for kind in KINDS:
        steps = messages(SEAM_REQUESTS, args.output_len, kind, tokens)
        makers = (OutputProcessor, MethodProcessor, InlineProcessor)
        times_of: dict[type[OutputProcessor], list[float]] = {maker: [] for maker in makers}
        for turn in range(max(args.repeats * 6, 3)):
            for maker in makers[turn % 3 :] + makers[: turn % 3]:
                elapsed = run(lambda maker=maker: maker(tokenizer), SEAM_REQUESTS, 1, kind, steps, args.output_len)  # type: ignore[misc]
                times_of[maker].append(elapsed)
        own = times_of[OutputProcessor]
        seam[kind.name] = {
            name: statistics.median(mine / other for mine, other in zip(own, times_of[maker], strict=True))
            for name, maker in (("method", MethodProcessor), ("inline", InlineProcessor))
        }
        print(f"{kind.name:<14}{seam[kind.name]['method']:>24.4f}{seam[kind.name]['inline']:>26.4f}", flush=True)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"us_per_token": results, "seam": seam, "output_len": args.output_len}, file, indent=2)


if __name__ == "__main__":
    main()
