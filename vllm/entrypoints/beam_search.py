"""Beam search on the engine's own sharing.

Every beam is a request for one token with its most likely alternatives. All beams of all prompts run in the same steps.
Nothing is computed twice: beside each beam's request stands one that only holds its prompt's blocks, and the beams that
grow from it continue there. They share its full blocks, copy the one that is not full, and compute one token each.
(Under memory pressure a held prompt may be given up; then what the prefix cache still has is used.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from vllm.logprobs import LogprobsOnePosition
from vllm.lora.request import LoRARequest
from vllm.sampling_params import BeamSearchParams, SamplingParams
from vllm.v1.engine.batch import Batch, Entry
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.engine.processor import TokenizedPrompt

if TYPE_CHECKING:
    from vllm.entrypoints.progress import ProgressBar
    from vllm.tokenizers import Tokenizer


@dataclass
class BeamSearchSequence:
    """One of the sequences that a search returns."""

    tokens: list[int]
    """The prompt's, then the generated ones."""
    logprobs: list[LogprobsOnePosition]
    """An entry per step: the candidates there."""
    lora_request: LoRARequest | None = None
    cum_logprob: float = 0.0
    text: str | None = None
    """Of all tokens; None without a tokenizer."""
    finish_reason: str | None = None
    """"stop" or "length"."""
    stop_reason: int | str | None = None
    """Id of the end-of-sequence token, for "stop"."""


@dataclass
class BeamSearchOutput:
    """Result for one prompt: the best `beam_width` sequences, best first."""

    sequences: list[BeamSearchSequence]


@dataclass
class _Beam(BeamSearchSequence):
    """One that may still grow."""

    continues: int = -1
    """Handle that holds what it has in common with the beam it grew from."""


@dataclass
class _Search:
    """One prompt's search."""

    beams: list[_Beam]
    cache_salt: str | None
    done: list[_Beam] = field(default_factory=list)


def beam_search(
    engine: LLMEngine,
    prompts: Sequence[TokenizedPrompt],
    params: BeamSearchParams,
    loras: Sequence[LoRARequest | None],
    request_ids: Iterator[int],
    progress: ProgressBar | None = None,
) -> list[BeamSearchOutput]:
    """Search for every prompt; see `LLM.beam_search`."""
    info = engine.model_info
    width = min(2 * params.beam_width, info.vocab_size)
    longest = min(engine.client.info.max_prompt_len + 1, engine.vllm_config.model.max_model_len)
    eos = frozenset() if params.ignore_eos else frozenset(info.eos_token_ids)
    one_token = SamplingParams(
        max_tokens=1, logprobs=width, temperature=params.temperature, ignore_eos=True, detokenize=False
    )
    searches = [
        _Search([_Beam(prompt.token_ids.tolist(), [], lora)], prompt.cache_salt)
        for prompt, lora in zip(prompts, loras, strict=True)
    ]
    held: list[int] = []
    try:
        for step in range(params.max_tokens):
            if progress is not None:
                progress.advance(sum(not search.beams for search in searches))
            owners = [(search, beam) for search in searches for beam in search.beams]
            if not owners:
                break
            is_last = step + 1 == params.max_tokens
            batch = Batch(
                engine, [_entry(search, beam, one_token, not is_last) for search, beam in owners], request_ids
            )
            try:
                outputs = batch.run()
            finally:
                engine.release(held)
                held = list(batch.holds.values())
            grown: dict[int, list[_Beam]] = {}
            for index, ((search, beam), output) in enumerate(zip(owners, outputs, strict=True)):
                logprobs = output.outputs[0].logprobs
                candidates = None if logprobs is None else logprobs[0]
                assert candidates is not None  # they were asked for
                beam.continues = batch.holds.get(index, -1)
                _extend(search, beam, candidates, eos, params, grown.setdefault(id(search), []))
            for search in searches:
                best = sorted(grown.get(id(search), ()), key=lambda beam: beam.cum_logprob, reverse=True)
                search.beams = best[: params.beam_width]
                if is_last or (search.beams and len(search.beams[0].tokens) >= longest):
                    for beam in search.beams:
                        beam.finish_reason = "length"
                    search.done += search.beams
                    search.beams = []
    finally:
        engine.release(held)
    if progress is not None:
        progress.advance(len(searches))
        progress.close()
    return [_ranked(search, eos, params, engine.tokenizer) for search in searches]


def _entry(search: _Search, beam: _Beam, params: SamplingParams, hold: bool) -> Entry:
    prompt = TokenizedPrompt(None, np.array(beam.tokens, np.int32), search.cache_salt)
    return Entry(prompt, params, beam.lora_request, own_use=True, continues=beam.continues, hold=hold)


def _extend(
    search: _Search,
    beam: _Beam,
    candidates: LogprobsOnePosition,
    eos: frozenset[int],
    params: BeamSearchParams,
    into: list[_Beam],
) -> None:
    """The beam with each of its candidates: ended ones are done, the others may become beams."""
    for token, value in candidates.items():
        ends = token in eos
        keep = not ends or params.include_stop_str_in_output
        following = _Beam(
            [*beam.tokens, token] if keep else beam.tokens,
            [*beam.logprobs, candidates],
            beam.lora_request,
            beam.cum_logprob + value.logprob,
            finish_reason="stop" if ends else None,
            stop_reason=token if ends else None,
            continues=beam.continues,
        )
        (search.done if ends else into).append(following)


def _ranked(
    search: _Search, eos: frozenset[int], params: BeamSearchParams, tokenizer: Tokenizer | None
) -> BeamSearchOutput:
    def score(sequence: BeamSearchSequence) -> float:
        length = len(sequence.tokens) - (sequence.tokens[-1] in eos)
        return sequence.cum_logprob / float(max(length, 1) ** params.length_penalty)

    best = [
        BeamSearchSequence(
            list(beam.tokens),
            beam.logprobs,
            beam.lora_request,
            beam.cum_logprob,
            None if tokenizer is None else tokenizer.decode(beam.tokens),
            beam.finish_reason,
            beam.stop_reason,
        )
        for beam in sorted(search.done, key=score, reverse=True)[: params.beam_width]
    ]
    return BeamSearchOutput(best)
