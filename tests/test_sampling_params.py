"""SamplingParams: what is accepted, what is refused and how the refusal reads. CONTRACT rules 1, 3, 4, 5, 6."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
import re

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm import sampling_params as module
from vllm.exceptions import BadRequestError, VLLMError
from vllm.sampling_params import GuidedDecodingParams, RequestOutputKind, SamplingParams, StructuredOutputsParams

FIELDS = """n best_of presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop
stop_token_ids bad_words include_stop_str_in_output ignore_eos max_tokens min_tokens logprobs
prompt_logprobs flat_logprobs detokenize skip_special_tokens spaces_between_special_tokens
logits_processors truncate_prompt_tokens output_kind structured_outputs guided_decoding logit_bias
allowed_token_ids extra_args skip_reading_prefix_cache finish_after""".split()


def refused(name: str, **kwargs: object) -> str:
    """The message with which the constructor, and `verify` after an assignment, refuse `kwargs[name]`."""
    with pytest.raises(BadRequestError) as caught:
        SamplingParams(**kwargs)  # type: ignore[arg-type]
    assert isinstance(caught.value, (ValueError, VLLMError))
    assert caught.value.parameter == name
    assert name in str(caught.value)
    params = SamplingParams()
    for key, value in kwargs.items():
        setattr(params, key, value)
    with pytest.raises(BadRequestError) as again:
        params.verify()
    assert str(again.value) == str(caught.value)
    return str(caught.value)


def test_fields_are_those_that_programs_filter_by() -> None:
    public = [name for name in SamplingParams.__struct_fields__ if name != "bad_words_token_ids"]
    assert public == FIELDS
    assert set(FIELDS) <= set(SamplingParams.__annotations__)
    assert list(inspect.signature(SamplingParams).parameters)[: len(FIELDS)] == FIELDS


def test_defaults() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.seed, params.logprobs) == (16, 0, None, None)
    assert params.output_kind is RequestOutputKind.CUMULATIVE
    assert params.detokenize
    assert params.skip_special_tokens
    assert not params.ignore_eos
    assert params.num_children == 1
    assert params.stop_strings == []


@pytest.mark.parametrize("n", [True, False, 2.0, "2", None, [2], 0, -1, np.bool_(True), 2**31, 10**400, math.nan])
def test_rule_01_n_is_an_int_of_at_least_one(n: object) -> None:
    refused("n", n=n)


@pytest.mark.parametrize("n", [1, 2, 10_000, np.int64(3)])
def test_rule_01_n_accepted(n: int) -> None:
    params = SamplingParams(n=n)
    assert type(params.n) is int
    assert params.n == int(n)


@pytest.mark.parametrize("temperature", [0, 0.0, -0.0])
def test_rule_03_greedy_with_many_names_both_fields(temperature: float) -> None:
    message = refused("n", n=2, temperature=temperature)
    assert "temperature" in message
    assert "n=2" in message
    message = refused("best_of", best_of=2, temperature=temperature)
    assert "temperature" in message
    SamplingParams(n=1, temperature=temperature).verify()


def test_rule_04_best_of() -> None:
    params = SamplingParams(n=2, best_of=5, output_kind=RequestOutputKind.FINAL_ONLY)
    params.verify()
    assert params.num_children == 5
    assert SamplingParams(best_of=None).best_of is None  # llama-index passes it
    assert "n=3" in refused("best_of", n=3, best_of=2)
    for value in (True, 2.0, "2", 0, -1):
        refused("best_of", best_of=value)


def test_rule_04_best_of_with_streaming_is_refused() -> None:
    refused("best_of", n=2, best_of=4, output_kind=RequestOutputKind.DELTA)
    cumulative = SamplingParams(n=2, best_of=4)  # LLM.generate sets FINAL_ONLY before it submits
    with pytest.raises(BadRequestError, match="best_of.*streaming"):
        cumulative.verify()
    cumulative.output_kind = RequestOutputKind.FINAL_ONLY
    cumulative.verify()
    SamplingParams(n=1, best_of=1, output_kind=RequestOutputKind.DELTA).verify()


def test_rule_05_finish_after() -> None:
    SamplingParams(n=4, finish_after=2).verify()
    SamplingParams(n=4, finish_after=4).verify()
    assert "n=4" in refused("finish_after", n=4, finish_after=5)
    assert "best_of" in refused("finish_after", n=4, best_of=4, finish_after=2)
    for value in (True, 1.0, "1", 0, -1):
        refused("finish_after", n=4, finish_after=value)


def test_rule_06_seed() -> None:
    assert SamplingParams(seed=-1).seed is None
    for seed in (0, 7, 2**63 - 1, -(2**63), -2):
        assert SamplingParams(seed=seed).seed == seed
    for value in (True, 1.0, "1", 2**63, -(2**63) - 1):
        refused("seed", seed=value)


@pytest.mark.parametrize(
    ("name", "good", "bad", "range_text"),
    [
        ("presence_penalty", [-2, 2, 0.5], [-2.01, 2.01], "between -2 and 2"),
        ("frequency_penalty", [-2, 2, 0.5], [-2.01, 2.01], "between -2 and 2"),
        ("repetition_penalty", [0.1, 1, 5], [0, -1, 1e39], "above 0"),
        ("temperature", [0, 0.01, 1, 100], [-0.1, 1e39], "0 (greedy) or above"),
        ("top_p", [1, 0.001], [0, -0.1, 1.001], "above 0 and at most 1"),
        ("min_p", [0, 1, 0.5], [-0.001, 1.001], "between 0 and 1"),
    ],
)
def test_float_fields(name: str, good: list[float], bad: list[float], range_text: str) -> None:
    for value in good:
        stored = getattr(SamplingParams(**{name: value}), name)
        assert type(stored) is float
        assert stored == value
    assert getattr(SamplingParams(**{name: np.float32(1.0)}), name) == 1.0
    for value in bad:
        assert range_text in refused(name, **{name: value})
    for value in (math.nan, math.inf, -math.inf, "1", None, True, [1.0], 10**400, np.array([1.0, 2.0])):
        assert range_text in refused(name, **{name: value})


def test_tiny_temperatures_are_raised(fresh_warnings: None, log: pytest.LogCaptureFixture) -> None:
    assert SamplingParams(temperature=1e-30).temperature == module.MIN_TEMPERATURE
    assert "temperature" in log.text
    assert SamplingParams(temperature=module.MIN_TEMPERATURE).temperature == module.MIN_TEMPERATURE


@pytest.mark.parametrize(
    ("name", "good", "bad", "range_text"),
    [
        ("top_k", [1, 50, 2**31 - 1], [-2, 2**31], "at least 1, or 0 or -1 for off"),
        ("max_tokens", [1, 2**31 - 1], [0, -1, 2**31], "at least 1"),
        ("min_tokens", [0, 16], [-1, 2**31], "at least 0"),
        ("logprobs", [-1, 0, 5], [-2], "-1 for the whole vocabulary"),
        ("prompt_logprobs", [-1, 0, 5], [-2], "-1 for the whole vocabulary"),
        ("truncate_prompt_tokens", [-1, 1, 100], [0, -2], "-1 for the model's limit"),
    ],
)
def test_int_fields(name: str, good: list[int], bad: list[int], range_text: str) -> None:
    for value in good:
        assert getattr(SamplingParams(**{name: value}), name) == value
        assert type(getattr(SamplingParams(**{name: np.int32(value)}), name)) is int
    for value in [*bad, 1.5, "1", [1]]:
        assert range_text in refused(name, **{name: value})
    if name not in ("logprobs", "prompt_logprobs"):
        refused(name, **{name: True})


def test_top_k_off_in_both_spellings() -> None:
    assert SamplingParams(top_k=-1).top_k == 0
    assert SamplingParams(top_k=0).top_k == 0


def test_logprobs_as_a_bool_means_what_it_means_upstream() -> None:
    assert SamplingParams(logprobs=True).logprobs == 1  # type: ignore[arg-type]
    assert SamplingParams(logprobs=False).logprobs is None  # type: ignore[arg-type]


def test_min_tokens_above_max_tokens() -> None:
    message = refused("min_tokens", min_tokens=17, max_tokens=16)
    assert "max_tokens=16" in message
    SamplingParams(min_tokens=17, max_tokens=None)


@pytest.mark.parametrize("name", module._FLAG_NAMES)
def test_flags(name: str) -> None:
    for value in (True, False):
        assert getattr(SamplingParams(**{name: value}), name) is value
    for value in (1, 0, "true", None, 0.0, np.array([1, 2])):
        refused(name, **{name: value})


def test_skip_reading_prefix_cache() -> None:
    for value in (True, False, None):
        assert SamplingParams(skip_reading_prefix_cache=value).skip_reading_prefix_cache is value
    refused("skip_reading_prefix_cache", skip_reading_prefix_cache=1)


def test_output_kind() -> None:
    for kind in RequestOutputKind:
        assert SamplingParams(output_kind=kind).output_kind is kind
    for value in (2, "DELTA", None):
        refused("output_kind", output_kind=value)


def test_stop() -> None:
    assert SamplingParams(stop="a").stop == ["a"]
    assert SamplingParams(stop=("a", "b")).stop == ["a", "b"]  # type: ignore[arg-type]
    assert SamplingParams(stop=[]).stop_strings == []
    for value in ("", [""], ["a", 1], 5, {"a": 1}, ["x"] * (module.MAX_STOP_STRINGS + 1), "x" * 4097, ["x" * 4096] * 5):
        refused("stop", stop=value)
    assert "detokenize" in refused("stop", stop=["a"], detokenize=False)
    given_list = ["a"]
    params = SamplingParams(stop=given_list)
    given_list.append("b")
    assert params.stop == ["a"]


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
def test_token_id_lists(name: str) -> None:
    assert getattr(SamplingParams(**{name: (3, 1)}), name) == [3, 1]
    assert getattr(SamplingParams(**{name: {3, 1}}), name) == [1, 3]
    assert getattr(SamplingParams(**{name: list(np.array([3, 1]))}), name) == [3, 1]
    for value in ([-1], [True], ["1"], [1.0], "12", 5, [[1]], [2**31], {1, "a"}):
        refused(name, **{name: value})


def test_list_limits() -> None:
    refused("stop_token_ids", stop_token_ids=list(range(module.MAX_STOP_TOKEN_IDS + 1)))
    refused("allowed_token_ids", allowed_token_ids=range(5))
    refused("allowed_token_ids", allowed_token_ids=[])
    refused("bad_words", bad_words=["x"] * (module.MAX_BAD_WORDS + 1))
    refused("logit_bias", logit_bias=dict.fromkeys(range(module.MAX_LOGIT_BIAS + 1), 1.0))
    refused("logits_processors", logits_processors=[len] * (module.MAX_LOGITS_PROCESSORS + 1))
    assert len(SamplingParams(stop=["x"] * module.MAX_STOP_STRINGS).stop_strings) == module.MAX_STOP_STRINGS


def test_bad_words() -> None:
    assert SamplingParams(bad_words=["a", " b"]).bad_words == ["a", " b"]
    for value in ([""], [1], 5):
        refused("bad_words", bad_words=value)
    refused("bad_words_token_ids", bad_words_token_ids=[[1]])


def test_logit_bias() -> None:
    params = SamplingParams(logit_bias={5: 1, np.int64(6): -100.0})
    assert params.logit_bias == {5: 1.0, 6: -100.0}
    assert all(type(key) is int and type(value) is float for key, value in params.logit_bias.items())
    for value in (
        {"5": 1.0},
        {5: math.nan},
        {5: math.inf},
        {5: 100.1},
        {5: "1"},
        {-1: 1.0},
        {True: 1.0},
        [5],
        {5: True},
    ):
        refused("logit_bias", logit_bias=value)


def test_logits_processors() -> None:
    assert SamplingParams(logits_processors=[len]).logits_processors == [len]
    for value in (len, [1], "len", ["len"]):
        refused("logits_processors", logits_processors=value)


def test_extra_args() -> None:
    assert SamplingParams(extra_args={"a": [1]}).extra_args == {"a": [1]}
    for value in ([1], {1: 2}, "a"):
        refused("extra_args", extra_args=value)


def test_unknown_keyword() -> None:
    with pytest.raises(TypeError, match="use_beam_search"):
        SamplingParams(use_beam_search=True)  # type: ignore[call-arg]


@pytest.mark.parametrize("kind", [StructuredOutputsParams, GuidedDecodingParams])
def test_structured_outputs_take_exactly_one(kind: type[StructuredOutputsParams]) -> None:
    name = "guided_decoding" if kind is GuidedDecodingParams else "structured_outputs"
    good: list[dict[str, object]] = [
        {"json": "{}"},
        {"json": {"type": "object"}},
        {"regex": "a+"},
        {"choice": ["a", "b"]},
        {"grammar": "root ::= 'a'"},
        {"json_object": True},
        {"structural_tag": "{}"},
        {"json": "{}", "whitespace_pattern": " ?", "disable_any_whitespace": True},
    ]
    for kwargs in good:
        value = kind(**kwargs)  # type: ignore[arg-type]
        params = SamplingParams(**{name: value})
        assert params.constraint is value
    bad: list[dict[str, object]] = [
        {},
        {"json_object": False},
        {"json": "{}", "regex": "a"},
        {"json": 5},
        {"regex": 5},
        {"regex": ""},
        {"choice": []},
        {"choice": "ab"},
        {"choice": [""]},
        {"choice": [1]},
        {"json_object": 1},
        {"regex": "a", "disable_fallback": 1},
    ]
    for kwargs in bad:
        with pytest.raises(BadRequestError, match=name) as caught:
            kind(**kwargs)  # type: ignore[arg-type]
        assert caught.value.parameter == name
    refused(name, **{name: {"regex": "a"}})


def test_guided_and_structured_together() -> None:
    refused(
        "guided_decoding",
        structured_outputs=StructuredOutputsParams(regex="a"),
        guided_decoding=GuidedDecodingParams(regex="a"),
    )


def test_a_mutated_constraint_is_checked_again() -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    assert params.structured_outputs is not None
    params.structured_outputs.json = "{}"
    with pytest.raises(BadRequestError, match="exactly one"):
        params.verify()


def everything() -> SamplingParams:
    return SamplingParams(
        n=3,
        temperature=0.5,
        top_k=-1,
        stop=["x"],
        stop_token_ids=[1],
        bad_words=["bad"],
        logit_bias={1: 2.0},
        allowed_token_ids=[1, 2],
        extra_args={"a": {"b": [1]}},
        structured_outputs=StructuredOutputsParams(json={"type": "object"}),
        seed=2**63 - 1,
        max_tokens=None,
        output_kind=RequestOutputKind.DELTA,
        finish_after=2,
    )


def test_msgpack_round_trip() -> None:
    for params in (SamplingParams(), everything()):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    with pytest.raises(TypeError):
        msgspec.msgpack.encode(SamplingParams(logits_processors=[len]))


def test_a_message_from_elsewhere_is_checked_too() -> None:
    with pytest.raises(msgspec.ValidationError, match="n must be at least 1"):
        msgspec.msgpack.decode(msgspec.msgpack.encode({"n": 0}), type=SamplingParams)


@pytest.mark.parametrize(
    "copier", [copy.deepcopy, SamplingParams.clone, lambda params: pickle.loads(pickle.dumps(params))]
)
def test_copies_share_no_container(copier) -> None:  # type: ignore[no-untyped-def]
    original = everything()
    twin = copier(original)
    assert twin == original
    assert twin is not original
    twin.n = 9
    twin.stop.append("y")
    twin.stop_token_ids.append(5)
    twin.bad_words.append("w")
    twin.logit_bias[9] = 1.0
    twin.allowed_token_ids.append(5)
    twin.extra_args["a"]["b"].append(2)
    twin.structured_outputs.json["x"] = 1
    assert original == everything()


def test_clone_keeps_the_processors_themselves() -> None:
    def processor(output_ids: list[int], logits: object) -> object:
        return logits

    original = SamplingParams(logits_processors=[processor])
    twin = original.clone()
    assert twin.logits_processors is not original.logits_processors
    assert twin.logits_processors == [processor]


def test_mutable_as_programs_expect() -> None:
    params = SamplingParams()
    params.n = 8  # lighteval
    params.max_tokens = 100  # openrlhf
    params.verify()
    rebuilt = SamplingParams(**{name: getattr(params, name) for name in params.__struct_fields__})  # outlines
    assert rebuilt == params


def test_repr_shows_what_differs_from_the_defaults() -> None:
    assert repr(SamplingParams(n=2, temperature=0.5)) == "SamplingParams(n=2, temperature=0.5)"


def test_a_value_whose_repr_fails_is_still_refused() -> None:
    class Hostile:
        def __repr__(self) -> str:
            raise RuntimeError

    assert "Hostile" in refused("n", n=Hostile())
    assert len(refused("stop", stop=[["x" * 10_000]])) < 300


values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.lists(st.one_of(st.integers(), st.text(max_size=2), st.floats(), st.none()), max_size=3),
    st.dictionaries(st.one_of(st.integers(), st.text(max_size=2)), st.one_of(st.floats(), st.integers()), max_size=3),
)


@given(st.dictionaries(st.sampled_from(FIELDS), values, max_size=4))
def test_anything_is_accepted_or_refused_by_name(kwargs: dict[str, object]) -> None:
    try:
        params = SamplingParams(**kwargs)  # type: ignore[arg-type]
    except BadRequestError as error:
        assert error.parameter in FIELDS
        assert re.search(error.parameter, str(error))
        return
    snapshot = copy.copy(params)
    params.output_kind = RequestOutputKind.FINAL_ONLY
    params.verify()
    params.output_kind = snapshot.output_kind
    assert params == snapshot  # checking again changes nothing
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_ints_too_large_to_print() -> None:
    for name in ("n", "seed", "temperature"):
        refused(name, **{name: 10**5000})
