"""What crosses to another process comes out as it went in, and what cannot cross is refused by name."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.v1.engine.fakes import fake_config
from vllm import exceptions
from vllm.config import VllmConfig
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import serial
from vllm.v1.messages import ChildTimes, EngineCoreOutputs, EngineCoreRequest, LogprobColumnsMsg, SchedulerStats

TO_CORE, FROM_CORE = serial.Decoder(serial.ToCore), serial.Decoder(serial.FromCore)


def round_trip(message, decoder):
    return decoder.decode(serial.Encoder().encode(message))


def equal(one, other):
    """Structs with arrays in them."""
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, msgspec.Struct):
        return type(one) is type(other) and all(
            equal(getattr(one, name), getattr(other, name)) for name in one.__struct_fields__
        )
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


def columns():
    return LogprobColumnsMsg(
        np.array([0, 2, 2], np.int32),
        np.array([5, 6], np.int32),
        np.array([-1, -2], np.float32),
        np.array([1, 0], np.int32),
    )


PARAMS = SamplingParams(
    n=3, stop=["a"], logit_bias={5: 1.5}, allowed_token_ids=[5], output_kind=RequestOutputKind.DELTA, seed=2**63 - 1
)


@pytest.mark.parametrize("message", [
    serial.Add([
        EngineCoreRequest([1, 2**60], np.arange(3, dtype=np.int32), PARAMS, 1.5, True, [2], 7, None, "salt", 2)
    ]),
    serial.Add([]),
    serial.Abort([1, 2]),
    serial.StopChildren([3]),
    serial.Call(4, "sleep", [1, None, "x"], {"tags": ["weights"]}),
    serial.Hello(b"{}"),
    serial.Shutdown(),
], ids=lambda message: type(message).__name__)  # fmt: skip
def test_to_the_core(message):
    assert equal(message, round_trip(message, TO_CORE))


@pytest.mark.parametrize("message", [
    serial.Outputs(EngineCoreOutputs(
        np.array([2**50]), np.array([0, 2], np.int32), np.array([7, 8], np.int32), np.array([1], np.uint8),
        np.array([-1]), np.array([3], np.int32), columns(),
        ChildTimes(np.array([1.0]), np.array([2.0]), np.array([3.0]), np.array([1], np.int32)),
        {2**50: columns()}, {2**50: "it failed"}, np.array([2**50]), 4, SchedulerStats(step=5), 6.5,
    )),
    serial.Outputs(EngineCoreOutputs(*(np.empty(0, t) for t in "q i i B q i".split()))),
    serial.Result(1, {"a": [1, 2.5, None, "x"]}),
    serial.Result(2, None, ("ValueError", "bad")),
    serial.Ready(serial.CoreInfo(1, 2, 3)),
    serial.Failed(("RuntimeError", "it fell")),
], ids=lambda message: type(message).__name__)  # fmt: skip
def test_from_the_core(message):
    assert equal(message, round_trip(message, FROM_CORE))


@given(st.sampled_from(["u1", "u4", "i4", "i8", "u8", "f4", "f8", "?"]), st.integers(0, 40), st.integers(1, 3))
def test_arrays_of_any_kind(code, length, stride):
    class Holder(msgspec.Struct):
        values: np.ndarray

    array = (np.arange(length * stride) % 2).astype(code)[::stride]
    decoded = round_trip(Holder(array), serial.Decoder(Holder)).values
    assert decoded.dtype == array.dtype
    assert decoded.tolist() == array.tolist()


@pytest.mark.parametrize("value", [np.zeros((2, 2)), np.array(["x"]), np.array([None]), ..., 1j], ids=repr)
def test_what_cannot_cross(value):
    with pytest.raises(NotImplementedError, match="cannot send"):
        serial.Encoder().encode(serial.Call(1, "x", [value]))


def test_callables_are_refused_by_name():
    def my_function():
        pass

    with pytest.raises(NotImplementedError, match=r"my_function.*in-process core"):
        serial.Encoder().encode(serial.Call(1, "collective_rpc", [my_function]))


@given(st.binary(max_size=60))
def test_garbage_is_refused(data):
    try:
        message = TO_CORE.decode(data)
    except msgspec.MsgspecError:
        return
    assert type(message) in serial.ToCore.__args__


def test_the_configuration():
    config = fake_config(hf_overrides={"a": {"b": [1, None]}}, seed=5, max_n=7)
    assert serial.load_config(VllmConfig, serial.dump_config(config)) == config


@pytest.mark.parametrize("error", [
    ValueError("a"), exceptions.BadRequestError("b", "n"), exceptions.EngineStartError("c"), RuntimeError("d"),
    exceptions.WeightError("e"), NotImplementedError("f"),
], ids=repr)  # fmt: skip
def test_errors_keep_their_class(error):
    revived = serial.revive_error(serial.describe_error(error))
    assert type(revived) is type(error)
    assert str(revived) == str(error)


def test_unknown_errors_are_named():
    class StrangeError(Exception):
        pass

    revived = serial.revive_error(serial.describe_error(StrangeError("odd")))
    assert type(revived) is exceptions.EngineError
    assert str(revived) == "StrangeError: odd"
    assert isinstance(serial.revive_error(("UnicodeDecodeError", "x")), exceptions.EngineError)
    assert isinstance(serial.revive_error(("print", "x")), exceptions.EngineError)
    assert isinstance(serial.revive_error(("KeyboardInterrupt", "x")), exceptions.EngineError)
