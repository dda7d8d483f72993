"""The GGUF header reader: what the gguf package wrote comes back; files that lie are refused, never believed."""

from __future__ import annotations

import struct

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.models_util import tiny_gguf
from vllm.exceptions import CheckpointError
from vllm.model_executor.loader.gguf_file import GGUFFile

STRINGS = ["a", "", "ünï", "word" * 20, "<end>"]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 7)
    writer.add_int64("negative", -5)
    writer.add_float32("pi", 3.5)
    writer.add_bool("yes", True)
    writer.add_string("text", "grüß")
    writer.add_array("strings", STRINGS)
    writer.add_array("numbers", [1, 2, 3])
    writer.add_array("floats", [0.5, 1.5])
    writer.add_tensor("one", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("two", np.arange(64, dtype=np.float16).reshape(2, 32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata(path):
    metadata = GGUFFile(path).metadata
    assert metadata["general.architecture"] == "llama"
    assert metadata["llama.block_count"] == 7
    assert metadata["negative"] == -5
    assert metadata["pi"] == 3.5
    assert metadata["yes"] is True
    assert metadata["text"] == "grüß"
    assert metadata["strings"] == STRINGS
    assert metadata["numbers"].tolist() == [1, 2, 3]
    assert metadata["floats"].tolist() == [0.5, 1.5]
    assert metadata.array_length("strings") == len(STRINGS)
    assert metadata.byte_strings("strings") == [text.encode() for text in STRINGS]
    assert "absent" not in metadata
    assert metadata.get("absent", 3) == 3
    with pytest.raises(CheckpointError, match="not an array"):
        metadata.array_length("text")
    with pytest.raises(CheckpointError, match="not an array of strings"):
        metadata.byte_strings("numbers")


def test_find_strings(path):
    metadata = GGUFFile(path).metadata
    assert metadata.find_strings("strings", ["<end>", "a", "nowhere", "ord"]) == [4, 0]
    assert metadata.find_strings("strings", []) == []


def test_encoded_bytes_tell_values_apart(path):
    metadata = GGUFFile(path).metadata
    assert metadata.encoded("strings") == b"".join(struct.pack("<Q", len(t.encode())) + t.encode() for t in STRINGS)


def test_tensors(path):
    file = GGUFFile(path)
    one, two = file.tensors["one"], file.tensors["two"]
    assert (one.shape, one.type_name) == ((2, 3), "F32")
    assert file.data(one).view(np.float32).tolist() == [0, 1, 2, 3, 4, 5]
    assert (two.shape, two.type_name) == ((2, 32), "F16")
    assert file.data(two).view(np.float16).tolist() == list(range(64))
    assert not file.data(one).flags.writeable


def test_agrees_with_the_gguf_package_on_a_real_file(smollm2_path):
    file, reader = GGUFFile(smollm2_path), gguf.GGUFReader(smollm2_path)
    assert list(file.metadata) == [key for key in reader.fields if not key.startswith("GGUF.")]
    for key in file.metadata:
        value, expected = file.metadata[key], reader.fields[key].contents()
        assert (value.tolist() if isinstance(value, np.ndarray) else value) == expected, key
    assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        mine = file.tensors[tensor.name]
        assert mine.shape == tuple(tensor.shape[::-1].tolist())
        assert mine.offset == tensor.data_offset
        assert mine.num_bytes == tensor.n_bytes
        assert mine.type_name == tensor.tensor_type.name


def test_close_leaves_views_alive(path):
    file = GGUFFile(path)
    data = file.data(file.tensors["one"])
    file.close()
    assert data.view(np.float32).tolist() == [0, 1, 2, 3, 4, 5]
    GGUFFile(path).close()


def test_truncated_anywhere(path, tmp_path):
    whole = path.read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in range(0, len(whole), 7):
        cut.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            GGUFFile(cut)
    cut.write_bytes(whole[:-64])
    with pytest.raises(CheckpointError, match="truncated"):
        GGUFFile(cut)


@given(st.data())
def test_damaged_bytes_never_escape_as_another_error(data):
    whole = bytearray(tiny_gguf("llama", num_hidden_layers=1).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, 12_000))
        whole[place] = data.draw(st.integers(0, 255))
    path = tiny_gguf("llama", num_hidden_layers=1).with_name("damaged.gguf")
    path.write_bytes(whole)
    try:
        file = GGUFFile(path)
        for key in file.metadata:
            file.metadata[key]
        for tensor in file.tensors.values():
            file.data(tensor)
    except CheckpointError:
        pass


def header(*fields: bytes, tensors: bytes = b"", num_tensors: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, len(fields)) + b"".join(fields) + tensors


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def tensor(name: str, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04" + bytes(40), "not a GGUF file"),
        (header(version=1) + bytes(40), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(40), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "more than the file can hold"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "more than the file can hold"),
        (header(struct.pack("<Q", 2**63) + bytes(20)), "a name of"),
        (header(string("k") + struct.pack("<I", 77) + bytes(20)), "unknown type 77"),
        (header(string("k") + struct.pack("<IQ", 8, 2**62)), "past the end"),
        (header(string("k") + struct.pack("<IIQ", 9, 4, 2**62)), "past the end"),
        (header(string("k") + struct.pack("<IIQ", 9, 8, 2**61)), "more than the file can hold"),
        (header(string("k") + struct.pack("<IIQ", 9, 9, 1) + bytes(16)), "array of type 9"),
        (header(string("k") + struct.pack("<II", 4, 1), string("k") + struct.pack("<II", 4, 1)), "occurs twice"),
        (
            header(string("general.alignment") + struct.pack("<II", 4, 24)) + bytes(64),
            "not a power of two",
        ),
        (header(tensors=tensor("t", (4,), 0, 0), num_tensors=1), "truncated"),
        (header(tensors=tensor("t", (4,), 0, 2**62), num_tensors=1), "truncated"),
        (header(tensors=tensor("t", (2**40, 2**40), 0, 0), num_tensors=1), "truncated"),
        (header(tensors=tensor("t", (4,), 0, 1), num_tensors=1) + bytes(99), "multiple of the alignment"),
        (header(tensors=tensor("t", (33,), 2, 0), num_tensors=1) + bytes(99), "blocks of 32"),
        (header(tensors=tensor("t", (0,), 0, 0), num_tensors=1) + bytes(99), "blocks of 1"),
        (header(tensors=tensor("t", (1,) * 9, 0, 0), num_tensors=1) + bytes(99), "9 dimensions"),
        (header(tensors=tensor("t", (256,), 11, 0), num_tensors=1) + bytes(999), "type Q3_K; these are read"),
        (header(tensors=tensor("t", (256,), 99, 0), num_tensors=1) + bytes(999), "type 99"),
        (header(tensors=2 * tensor("t", (1,), 0, 0), num_tensors=2) + bytes(99), "occurs twice"),
    ],
)
def test_hostile_headers(tmp_path, content, message):
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        GGUFFile(path)


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be read"):
        GGUFFile(tmp_path / "absent.gguf")
