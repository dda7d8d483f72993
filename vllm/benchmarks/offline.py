"""What the two offline benchmarks share: their engine's flags, its start, streamed runs, and an engine's counters."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vllm.benchmarks import machine
from vllm.benchmarks.measures import RequestRecord
from vllm.benchmarks.results import Result
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import BadRequestError, ModelLoadError
from vllm.utils.argparse_utils import human_int

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams
    from vllm.benchmarks.datasets import Sample
    from vllm.config import VllmConfig
    from vllm.model_executor.spec import DecoderSpec
    from vllm.v1.messages import SchedulerStats


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Every engine argument, and "--backend vllm", which upstream's scripts take for the engine itself."""
    EngineArgs.add_cli_args(parser)
    for action in parser._actions:
        if action.dest == "backend" and action.choices is not None:
            action.choices = (*action.choices, "vllm")


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--n", type=human_int, default=1, metavar="N", help="completions per prompt (default: 1)")
    group.add_argument("--temperature", type=float, default=1.0, metavar="X", help="default: 1.0")
    group.add_argument("--disable-detokenize", action="store_true", help="token ids only")


def add_result_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("result")
    group.add_argument("--output-json", "--save-result", metavar="FILE", help="write the result to this file")
    group.add_argument("--plot", metavar="FILE", help="draw it to this file (needs matplotlib)")
    group.add_argument("--baseline", metavar="FILE", help="an earlier result, drawn and compared beside this one")
    group.add_argument("--disable-limits", action="store_true", help="do not measure what the machine can do")


def engine_args(args: argparse.Namespace, *, needs_tokenizer: bool) -> EngineArgs:
    """The engine's arguments. A config alone (dummy weights) has no tokenizer, and is then run without one."""
    if args.backend == "vllm":
        args.backend = "auto"
    made = EngineArgs.from_cli_args(args)
    if made.load_format == "dummy" and not made.skip_tokenizer_init and not has_tokenizer(made):
        if needs_tokenizer:
            raise BadRequestError(
                f"model {made.model!r} has no tokenizer, which texts need; give --tokenizer, or random prompts", "model"
            )
        made = dataclasses.replace(made, skip_tokenizer_init=True)
    return made


def has_tokenizer(args: EngineArgs) -> bool:
    from vllm.tokenizers import open_tokenizer

    try:
        open_tokenizer(args.tokenizer or args.model)
    except ModelLoadError:
        return False
    return True


def spec_of(config: VllmConfig) -> DecoderSpec:
    from vllm.model_executor.loader import open_checkpoint

    with open_checkpoint(config.model.path, config.model.load_format, config.model.hf_overrides) as checkpoint:
        return checkpoint.spec


@contextmanager
def started(args: EngineArgs) -> Iterator[tuple[LLM, float]]:
    """An engine, and the seconds it took to start; shut down at the end."""
    start = time.perf_counter()
    from vllm import LLM

    llm = LLM.from_engine_args(args)
    try:
        yield llm, time.perf_counter() - start
    finally:
        llm.shutdown()


class Counters:
    """What an engine counts, since this object was made."""

    def __init__(self, llm: Any) -> None:
        """`llm` has `metrics`: an LLMEngine or an AsyncLLM."""
        self._engine = llm
        self._before = self._now

    @property
    def _now(self) -> SchedulerStats:
        stats: SchedulerStats = self._engine.metrics.scheduler
        return stats

    @property
    def steps(self) -> int:
        return self._now.step - self._before.step

    @property
    def prompt_tokens_computed(self) -> int:
        return self._now.prompt_tokens_computed - self._before.prompt_tokens_computed

    @property
    def num_preemptions(self) -> int:
        return self._now.num_preemptions - self._before.num_preemptions


def as_prompt(sample: Sample) -> Any:
    if isinstance(sample.prompt, str):
        return sample.prompt
    return {"prompt_token_ids": sample.prompt}


def check_lengths(samples: Sequence[Sample], limit: int) -> None:
    """Raise BadRequestError if one cannot fit the context."""
    for index, sample in enumerate(samples):
        if sample.prompt_len + sample.output_len > limit:
            raise BadRequestError(
                f"prompt {index} has {sample.prompt_len} tokens and asks for {sample.output_len} more: the limit is "
                f"max_model_len, {limit}",
                "max_model_len",
            )


def stream(llm: LLM, samples: Sequence[Sample], params: Sequence[SamplingParams]) -> list[RequestRecord]:
    """Run everything at once, each token reported when it is made."""
    from vllm.sampling_params import RequestOutputKind

    engine = llm.llm_engine
    records: dict[str, RequestRecord] = {}
    try:
        for index, (sample, own) in enumerate(zip(samples, params, strict=True)):
            own = own.clone()
            own.output_kind = RequestOutputKind.DELTA
            request_id = f"bench-{index}"
            records[request_id] = RequestRecord(index, sample.prompt_len, time.perf_counter())
            engine.add_request(request_id, as_prompt(sample), own)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            moment = time.perf_counter()
            for output in outputs:
                note(records[output.request_id], output, moment)
    except BaseException:
        engine.abort_request(list(records))
        while engine.has_unfinished_requests():
            engine.step()
        raise
    return list(records.values())


def note(record: RequestRecord, output: RequestOutput, moment: float) -> None:
    """Take an output of kind DELTA in."""
    record.prompt_tokens = len(output.prompt_token_ids or ()) or record.prompt_tokens
    for completion in output.outputs:
        record.saw(
            completion.index, len(completion.token_ids), moment, completion.text, completion.finish_reason
        )  # fmt: skip


def from_outputs(outputs: Sequence[RequestOutput], start: float, end: float) -> list[RequestRecord]:
    """Records of a `generate` call. Only requests are timed there, so that children have no moments of their own."""
    records = []
    for index, output in enumerate(outputs):
        record = RequestRecord(index, len(output.prompt_token_ids or ()), start, end)
        for completion in output.outputs:
            record.saw(completion.index, len(completion.token_ids), end, "", completion.finish_reason)
        records.append(record)
    return records


def fractions(
    config: VllmConfig,
    limits: machine.Limits | None,
    records: Sequence[RequestRecord],
    counters: tuple[int, int],
    seconds: float,
) -> Result:
    """The fraction of the machine's limits that a run of (steps, prompt tokens computed) reached."""
    if limits is None:
        return {}
    steps, computed = counters
    needed = machine.need(
        spec_of(config),
        config.model.dtype,
        config.model.quantization,
        records,
        steps=steps,
        prompt_tokens_computed=computed,
    )
    return needed.fractions(limits, seconds)


def limits_for(args: argparse.Namespace, config: VllmConfig) -> machine.Limits | None:
    """Measured now, with the engine at rest."""
    if args.disable_limits:
        return None
    return machine.measure_limits(config.model.dtype, config.device.num_threads)


def say(text: str) -> None:
    """A remark that is no part of the result."""
    print(text, file=sys.stderr, flush=True)
