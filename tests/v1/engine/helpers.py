"""Short ways to run requests on the engines of the tests."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.llm_engine import LLMEngine

_ids = itertools.count()

KINDS = tuple(RequestOutputKind)
PROMPT = list(range(500, 521))


def new_id() -> str:
    return f"test-{next(_ids)}"


def params(**fields: Any) -> SamplingParams:
    """FINAL_ONLY and a few tokens, unless told otherwise."""
    kind = fields.pop("kind", RequestOutputKind.FINAL_ONLY)
    return SamplingParams(**({"max_tokens": 6, "output_kind": kind, "ignore_eos": True} | fields))


def drain(engine: LLMEngine) -> dict[str, list[RequestOutput]]:
    """Step to the end; outputs by request."""
    outputs: dict[str, list[RequestOutput]] = defaultdict(list)
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[output.request_id].append(output)
    return dict(outputs)


def run(
    engine: LLMEngine, prompt: Any = PROMPT, own: SamplingParams | None = None, **fields: Any
) -> list[RequestOutput]:
    """One request to its end: all its outputs."""
    request_id = new_id()
    engine.add_request(request_id, prompt, params(**fields) if own is None else own)
    return drain(engine)[request_id]


def run_one(engine: LLMEngine, prompt: Any = PROMPT, own: SamplingParams | None = None, **fields: Any) -> RequestOutput:
    """One FINAL_ONLY request to its end: its only output."""
    (output,) = run(engine, prompt, own, **fields)
    return output


async def stream(engine: AsyncLLM, prompt: Any = PROMPT, **fields: Any) -> list[RequestOutput]:
    """One request to its end, asynchronously."""
    return [output async for output in engine.generate(prompt, params(**fields), new_id())]


async def until_idle(engine: AsyncLLM) -> None:
    """Wait until the core has answered for every child, then check all tables."""
    for _ in range(2000):
        if not engine.output_processor.num_children:
            break
        await asyncio.sleep(0.002)
    await engine.check_integrity()


def join(outputs: Sequence[RequestOutput], kind: RequestOutputKind) -> dict[int, CompletionOutput]:
    """What a client has at the end, by index: deltas joined, else the last completion of each."""
    joined: dict[int, CompletionOutput] = {}
    for output in outputs:
        for completion in output.outputs:
            earlier = joined.get(completion.index)
            if kind is not RequestOutputKind.DELTA or earlier is None:
                joined[completion.index] = CompletionOutput(
                    completion.index,
                    completion.text,
                    list(completion.token_ids),
                    completion.cumulative_logprob,
                    None if completion.logprobs is None else list(completion.logprobs),
                    completion.finish_reason,
                    completion.stop_reason,
                )
                continue
            earlier.text += completion.text
            earlier.token_ids += completion.token_ids
            earlier.cumulative_logprob = completion.cumulative_logprob
            if completion.logprobs is not None:
                earlier.logprobs = [*(earlier.logprobs or []), *completion.logprobs]
            earlier.finish_reason, earlier.stop_reason = completion.finish_reason, completion.stop_reason
    return joined


def counter(engine: LLMEngine | AsyncLLM, name: str) -> int:
    """A counter of the engine's metrics."""
    return next(metric.value for metric in engine.get_metrics() if metric.name == name)  # type: ignore[attr-defined]
