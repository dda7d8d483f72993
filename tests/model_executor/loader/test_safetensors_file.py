"""The safetensors reader: what the library wrote comes back; files that lie are refused, never believed."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from tests.models_util import tiny_folder
from vllm.exceptions import CheckpointError
from vllm.model_executor.loader.safetensors_file import SafetensorsFile


def write(path, header, data=b"", length=None):
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(encoded) if length is None else length).to_bytes(8, "little") + encoded + data)
    return path


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_what_the_library_writes(tmp_path):
    arrays = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.arange(4, dtype=np.float16),
        "c": np.array(2.5),
    }
    save_file(arrays, tmp_path / "x.safetensors", metadata={"format": "np"})
    file = SafetensorsFile(tmp_path / "x.safetensors")
    assert set(file.tensors) == set(arrays)
    for name, value in arrays.items():
        tensor = file.tensors[name]
        assert (tensor.shape, tensor.dtype) == (value.shape, value.dtype.name)
        assert np.array_equal(file.data(tensor), value)
        assert not file.data(tensor).flags.writeable
    view = file.data(file.tensors["a"])
    file.close()
    assert view.tolist() == arrays["a"].tolist()


def test_bfloat16_is_its_bits(tmp_path):
    path = write(tmp_path / "x", {"w": entry("BF16", (2,), (0, 4))}, bytes([0x80, 0x3F, 0, 0xC0]))
    file = SafetensorsFile(path)
    assert file.tensors["w"].dtype == "bfloat16"
    assert file.data(file.tensors["w"]).tolist() == [0x3F80, 0xC000]


def test_data_at_an_odd_address(tmp_path):
    header = json.dumps({"w": entry()}).encode()
    header += b" " * (1 - len(header) % 2)
    file = SafetensorsFile(write(tmp_path / "x", header, np.array([1.5, -2], np.float32).tobytes()))
    assert len(header) % 2 == 1
    assert file.data(file.tensors["w"]).tolist() == [1.5, -2.0]


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        ([], "not a JSON object"),
        ({"w": 3}, "malformed"),
        ({"w": {"dtype": "F32"}}, "malformed"),
        ({"w": entry(shape=(-2,))}, "malformed"),
        ({"w": entry(shape=(2.0,))}, "malformed"),
        ({"w": entry(offsets=(0, 8, 9))}, "malformed"),
        ({"w": entry(offsets=(-8, 0))}, "malformed"),
        ({"w": entry(dtype=["F32"])}, "malformed"),
        ({"w": entry(dtype="I8")}, "dtype I8; these are read: F64, F32"),
        ({"w": entry(shape=(3,))}, "needs 12 bytes"),
        ({"w": entry(shape=(2**40, 2**40))}, "needs"),
        ({"w": entry(offsets=(8, 0))}, "needs 8 bytes"),
        ({"w": entry(offsets=(2**62, 2**62 + 8))}, "truncated"),
    ],
)
def test_hostile_headers(tmp_path, header, message):
    path = write(tmp_path / "hostile", header, bytes(8))
    with pytest.raises(CheckpointError, match=message):
        SafetensorsFile(path)


@pytest.mark.parametrize("length", [2**63, 10**9, 100])
def test_a_header_longer_than_the_file(tmp_path, length):
    path = write(tmp_path / "hostile", {"w": entry()}, bytes(8), length=length)
    with pytest.raises(CheckpointError, match="claims a header"):
        SafetensorsFile(path)


def test_truncated_anywhere(tmp_path):
    whole = write(tmp_path / "x", {"w": entry()}, bytes(8)).read_bytes()
    for length in range(len(whole)):
        (tmp_path / "cut").write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="cut"):
            SafetensorsFile(tmp_path / "cut")


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be read"):
        SafetensorsFile(tmp_path / "absent")


@given(st.data())
def test_damaged_bytes_never_escape_as_another_error(data):
    source = tiny_folder("llama", num_hidden_layers=1) / "model.safetensors"
    whole = bytearray(source.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, 1000))] = data.draw(st.integers(0, 255))
    path = source.with_name("damaged.bin")
    path.write_bytes(whole)
    try:
        file = SafetensorsFile(path)
        for tensor in file.tensors.values():
            file.data(tensor)
    except CheckpointError:
        pass
    finally:
        path.unlink()
