"""The processor: every form of a prompt, every limit, and refusals that leave no trace."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.v1.engine.fakes import EOS, FAKE_MODEL, VOCAB, bundled_tokenizer, fake_config
from vllm.exceptions import BadRequestError, PromptTooLongError, UnsupportedError
from vllm.lora.request import LoRARequest
from vllm.sampling_params import GuidedDecodingParams, RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.engine.processor import Processor

TEXT = "Once upon a time"


def make(tokenizer=True, max_prompt_len=10_000, callables=True, **changes):
    return Processor(
        fake_config(**changes), FAKE_MODEL, bundled_tokenizer() if tokenizer else None, max_prompt_len, callables
    )


PROCESSOR = make()
PARAMS = SamplingParams()


@pytest.mark.parametrize("prompt", [
    [5, 6, 7], (5, 6, 7), np.array([5, 6, 7]), np.array([5, 6, 7], np.uint8), [np.int64(5), 6, np.int32(7)],
    {"prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": np.array([5, 6, 7], np.int32)},
    {"prompt_token_ids": [5, 6, 7], "prompt": None},
], ids=repr)  # fmt: skip
def test_ids(prompt):
    tokenized = PROCESSOR.tokenize(prompt, PARAMS)
    assert tokenized.token_ids.tolist() == [5, 6, 7]
    assert tokenized.token_ids.dtype == np.int32
    assert tokenized.text is None


@pytest.mark.parametrize("prompt", [TEXT, {"prompt": TEXT}, {"prompt": TEXT, "prompt_token_ids": None}], ids=repr)
def test_text(prompt):
    tokenized = PROCESSOR.tokenize(prompt, PARAMS)
    assert tokenized.token_ids.tolist() == bundled_tokenizer().encode(TEXT)
    assert tokenized.text == TEXT


def test_ids_go_before_text():
    tokenized = PROCESSOR.tokenize({"prompt": TEXT, "prompt_token_ids": [1, 2]}, PARAMS)
    assert (tokenized.text, tokenized.token_ids.tolist()) == (TEXT, [1, 2])


@pytest.mark.parametrize(("prompt", "message"), [
    ("", "the prompt is empty"),
    ([], "the prompt is empty"),
    ({"prompt": ""}, "the prompt is empty"),
    ({"prompt_token_ids": []}, "the prompt is empty"),
    (None, "a prompt must be a string"),
    (5, "a prompt must be a string"),
    (b"bytes", "a prompt must be a string"),
    ({1, 2}, "a prompt must be a string"),
    ({}, "needs 'prompt' or 'prompt_token_ids'"),
    ({"prompt": 5}, "'prompt' must be a string"),
    ({"prompt_token_ids": "5"}, "'prompt_token_ids' must be a list"),
    ({"prompt": "x", "cache_salt": ""}, "'cache_salt' must be a non-empty string"),
    ({"prompt": "x", "cache_salt": 5}, "'cache_salt' must be a non-empty string"),
    ([-1], "token id -1 at position 0 is out of range"),
    ([5, VOCAB], f"token id {VOCAB} at position 1 is out of range.* 0 to {VOCAB - 1}"),
    ([5, 2**70], "is out of range"),
    ([5, 6.0], r"must be ints, got 6.0 \(float\) at position 1"),
    ([5, True], r"must be ints, got True \(bool\) at position 1"),
    ([5, None], r"must be ints, got None"),
    ([5, "6"], r"must be ints, got '6'"),
    ([[5]], r"must be ints, got \[5\]"),
    (np.array([0.5]), "must be ints in one dimension"),
    (np.array([[5]]), "must be ints in one dimension"),
    (np.array([True]), "must be ints in one dimension"),
    ("lone \ud800 surrogate", "not valid Unicode"),
], ids=repr)  # fmt: skip
def test_bad_prompts(prompt, message):
    with pytest.raises(BadRequestError, match=message):
        PROCESSOR.tokenize(prompt, PARAMS)


@pytest.mark.parametrize("name", ["multi_modal_data", "prompt_embeds", "encoder_prompt", "typo"])
def test_unknown_prompt_fields_are_refused_by_name(name):
    with pytest.raises(NotImplementedError, match=name):
        PROCESSOR.tokenize({"prompt": TEXT, name: {}}, PARAMS)


@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(
        ["prompt", "prompt_token_ids", "cache_salt", "x"]), inner, max_size=3),
    max_leaves=6,
))  # fmt: skip
def test_anything_gives_tokens_or_one_clear_error(prompt):
    try:
        tokenized = PROCESSOR.tokenize(prompt, PARAMS)
    except (BadRequestError, UnsupportedError) as error:
        assert str(error)
    else:
        assert 0 < len(tokenized.token_ids) < 256
        assert tokenized.token_ids.min() >= 0
        assert tokenized.token_ids.max() < VOCAB


@pytest.mark.parametrize(("keep", "expected"), [(1, 1), (5, 5), (19, 19), (20, 20), (1000, 20), (-1, 20)])
def test_truncation_keeps_the_end(keep, expected):
    ids = list(range(100, 120))
    tokenized = PROCESSOR.tokenize(ids, SamplingParams(truncate_prompt_tokens=keep))
    assert tokenized.token_ids.tolist() == ids[-expected:]


def test_truncation_of_text_too_long_otherwise():
    tokenized = PROCESSOR.tokenize("word " * 2000, SamplingParams(truncate_prompt_tokens=7))
    assert len(tokenized.token_ids) == 7


def test_batches_are_as_single_ones():
    prompts = [TEXT, [1, 2], {"prompt": "x"}, "another", "a third"] * 3
    batch = PROCESSOR.tokenize_batch(prompts, [PARAMS] * len(prompts))
    for prompt, tokenized in zip(prompts, batch, strict=True):
        alone = PROCESSOR.tokenize(prompt, PARAMS)
        assert (alone.text, alone.token_ids.tolist()) == (tokenized.text, tokenized.token_ids.tolist())


@pytest.mark.parametrize(("bad", "error"), [("", "empty"), ("word " * 300, "maximum context length"),
                                            ("x" * 10**6, "maximum context length")], ids=[0, 1, 2])  # fmt: skip
def test_batches_with_a_bad_one(bad, error):
    with pytest.raises(BadRequestError, match=error):
        PROCESSOR.tokenize_batch([TEXT, bad, TEXT], [PARAMS] * 3)


def test_batches_with_truncation():
    own = SamplingParams(truncate_prompt_tokens=3)
    batch = PROCESSOR.tokenize_batch(["word " * 500, "x " * 400], [own, own])
    assert [len(tokenized.token_ids) for tokenized in batch] == [3, 3]


def test_without_a_tokenizer():
    processor = make(tokenizer=False)
    assert processor.tokenize([5], PARAMS).token_ids.tolist() == [5]
    with pytest.raises(BadRequestError, match="no tokenizer"):
        processor.tokenize(TEXT, PARAMS)
    for name in ("stop", "bad_words"):
        with pytest.raises(BadRequestError, match=f"{name} needs a tokenizer"):
            processor.process("x", [5], SamplingParams(**{name: ["y"]}))


def test_limits_of_the_core():
    processor = make(max_prompt_len=20)
    with pytest.raises(PromptTooLongError, match=r"has 21 tokens.* at most 20 "):
        processor.tokenize([5] * 21, PARAMS)
    processor.tokenize([5] * 20, PARAMS)


def test_the_core_request():
    own = SamplingParams(n=3, ignore_eos=False)
    prompt = {"prompt_token_ids": [5, 6], "cache_salt": "salt"}
    submission = PROCESSOR.process("mine", prompt, own, RequestOutputKind.DELTA, arrival_time=3.5)
    request = submission.core_request
    assert submission.request_id == "mine"
    assert submission.kind is RequestOutputKind.DELTA
    assert request.params is own
    assert request.prompt_token_ids.tolist() == [5, 6]
    assert request.stream
    assert request.eos_token_ids == [EOS]
    assert request.cache_salt == "salt"
    assert request.arrival_time == 3.5
    assert PROCESSOR.process("x", [5], SamplingParams(ignore_eos=True)).core_request.eos_token_ids == []


@pytest.mark.parametrize(("kind", "stop", "stream"), [
    (RequestOutputKind.FINAL_ONLY, None, False), (RequestOutputKind.FINAL_ONLY, ["x"], True),
    (RequestOutputKind.DELTA, None, True), (RequestOutputKind.CUMULATIVE, None, True),
])  # fmt: skip
def test_when_tokens_are_reported(kind, stop, stream):
    assert PROCESSOR.process("x", [5], SamplingParams(stop=stop), kind).core_request.stream is stream


def test_what_the_core_needs_is_filled_into_a_copy():
    own = SamplingParams(max_tokens=None, bad_words=["bad"])
    request = PROCESSOR.process("x", [5] * 56, own).core_request
    assert request.params.max_tokens == 200
    encode = bundled_tokenizer().encode
    assert request.params.bad_words_token_ids == [encode("bad"), encode(" bad")]
    assert (own.max_tokens, own.bad_words_token_ids) == (None, None)


@pytest.mark.parametrize(("fields", "error", "name"), [
    ({"structured_outputs": StructuredOutputsParams(structural_tag="x")}, NotImplementedError, "structured_outputs"),
    ({"structured_outputs": StructuredOutputsParams(regex="((")}, ValueError, "structured_outputs"),
    ({"guided_decoding": GuidedDecodingParams(regex="(")}, ValueError, "structured_outputs"),
    ({"extra_args": {"x": 1}}, NotImplementedError, "extra_args"),
    ({"logprobs": 21}, ValueError, "logprobs must be at most 20"),
    ({"prompt_logprobs": -1}, ValueError, "prompt_logprobs must be at most 20"),
    ({"allowed_token_ids": [VOCAB]}, ValueError, "allowed_token_ids"),
    ({"logit_bias": {VOCAB: 1.0}}, ValueError, "logit_bias"),
    ({"stop_token_ids": [VOCAB]}, ValueError, "stop_token_ids"),
], ids=str)  # fmt: skip
def test_params_that_cannot_be_honoured(fields, error, name):
    with pytest.raises(error, match=name):
        PROCESSOR.process("x", [5], SamplingParams(**fields))


def test_processors_need_the_core_in_this_process():
    own = SamplingParams(logits_processors=[lambda ids, logits: logits])
    PROCESSOR.process("x", [5], own)
    with pytest.raises(UnsupportedError, match="in-process core"):
        make(callables=False).process("x", [5], own)


@pytest.mark.parametrize("bad", [None, {}, "params", 5])
def test_params_of_another_type(bad):
    with pytest.raises(BadRequestError, match="must be SamplingParams"):
        PROCESSOR.process("x", [5], bad)


@pytest.mark.parametrize("priority", [True, 1.0, "1", None])
def test_bad_priorities(priority):
    with pytest.raises(BadRequestError, match="priority must be an int"):
        make(policy="priority").process("x", [5], PARAMS, priority=priority)


def test_lora_needs_an_engine_for_it():
    with pytest.raises(BadRequestError, match="enable_lora"):
        PROCESSOR.process("x", [5], PARAMS, lora_request=LoRARequest("name", 1))


def test_params_that_changed_since_they_were_built():
    own = SamplingParams()
    own.top_p = 7.0
    with pytest.raises(BadRequestError, match="top_p"):
        PROCESSOR.process("x", [5], own)
