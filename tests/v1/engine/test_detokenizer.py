"""The incremental detokenizer against the definition in its docstring: the bundled vocabularies, and small ones."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from vllm.exceptions import BadRequestError
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import Tokenizer, open_tokenizer
from vllm.tokenizers.byte_table import byte_alphabet
from vllm.tokenizers.loading import convert, from_vocabulary
from vllm.tokenizers.tokenizer import SpecialTokens
from vllm.tokenizers.vocabulary import TokenType, Vocabulary
from vllm.v1.engine.detokenizer import IncrementalDetokenizer, LibraryDetokenizer, StopAutomaton, make_detokenizer

LETTERS = {byte: letter for letter, byte in byte_alphabet().items()}


def small_bytes() -> Tokenizer:
    """A byte-level vocabulary of few tokens, in which everything that can go wrong is likely."""
    pieces = [b"a", b"b", b"ab", b"ba", b"aab", b" ", b"\xc3", b"\xa9", b"\xe2", b"\x82", b"\xac", b"\xf0\x9f", b"\x98"]
    pieces += [b"\x80", b"\xff", b"a\xe2\x82", b"\xaca", "é".encode(), "\ufffd".encode(), "x€y".encode()]
    tokens = ["".join(LETTERS[byte] for byte in piece) for piece in pieces]
    types = [TokenType.NORMAL] * len(tokens) + [TokenType.CONTROL, TokenType.CONTROL, TokenType.USER_DEFINED]
    tokens += ["<s>", "</s>", "<tool call>"]
    vocabulary = Vocabulary(
        "bpe", tokens, np.array(types, np.uint8), np.zeros((0, 2), np.int32), roles={"eos": len(tokens) - 2}
    )
    return from_vocabulary(*convert(vocabulary))


def small_pieces(add_space_prefix: bool) -> Tokenizer:
    """The same for SentencePiece, with every byte."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab", "é", "▁▁"]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    types += [TokenType.NORMAL] * (len(tokens) - len(types))
    vocabulary = Vocabulary(
        "spm",
        tokens,
        np.array(types, np.uint8),
        np.zeros((0, 2), np.int32),
        roles={"unk": 0, "bos": 1, "eos": 2},
        add_space_prefix=add_space_prefix,
    )
    return from_vocabulary(*convert(vocabulary))


def word_pieces() -> Tokenizer:
    """A vocabulary that no byte table reproduces."""
    words = ["[UNK]", "[CLS]", "[SEP]", "un", "##able", "##s", "do", "not", "it", "é", "!", "."]
    library = tokenizers.Tokenizer(models.WordPiece({word: k for k, word in enumerate(words)}, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.decoder = decoders.WordPiece()
    library.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    special = SpecialTokens({"unk": ("[UNK]", 0), "sep": ("[SEP]", 2)}, frozenset({0, 1, 2}))
    return Tokenizer(lambda: library, len(words), special, None)


NAMES = ["smollm2", "gemma3", "small_bytes", "small_pieces", "small_pieces_prefix", "word_pieces"]
_cache: dict[str, Tokenizer] = {}


@pytest.fixture(scope="module")
def opened(smollm2_path: Path, gemma3_path: Path) -> dict[str, Tokenizer]:
    if not _cache:
        _cache.update(
            smollm2=open_tokenizer(smollm2_path),
            gemma3=open_tokenizer(gemma3_path),
            small_bytes=small_bytes(),
            small_pieces=small_pieces(False),
            small_pieces_prefix=small_pieces(True),
            word_pieces=word_pieces(),
        )
    return _cache


@lru_cache
def single_bytes(tokenizer: Tokenizer) -> dict[bytes, int]:
    """Tokens of one byte."""
    table = tokenizer.text_table(False)
    assert table is not None
    return {data: token_id for token_id, data in enumerate(table.data) if len(data) == 1}


@lru_cache
def partial_ids(tokenizer: Tokenizer) -> list[int]:
    """Tokens that are parts of characters."""
    table = tokenizer.text_table(False)
    return [] if table is None else [i for i, text in enumerate(table.texts) if text is None]


def id_lists(tokenizer: Tokenizer, max_size: int = 24) -> st.SearchStrategy[list[int]]:
    """Token ids: any, parts of characters, special ones, and ids that no token has."""
    size = tokenizer.vocab_size
    kinds = [
        st.integers(0, size - 1),
        st.sampled_from(sorted(tokenizer.special_ids)),
        st.sampled_from([-1, -7, size, size + 63, 2**31 - 1]),
    ]
    parts = partial_ids(tokenizer)
    if parts:
        kinds += [st.sampled_from(parts), st.sampled_from(parts)]
    return st.lists(st.one_of(kinds), max_size=max_size)


def cut(draw: st.DrawFn, ids: Sequence[int]) -> list[list[int]]:
    """The ids in portions, empty ones too."""
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=len(ids) + 2)))
    return [list(ids[start:end]) for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def reference_steps(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int], skip: bool) -> list[str]:
    """Text that each token completes, and at the end what the last one leaves: the definition, by Python's decoder."""

    def written(token_id: int) -> bytes:
        hidden = token_id < 0 or (skip and token_id in tokenizer.special_ids)
        data = tokenizer.token_bytes(token_id)
        assert data is not None
        return b"" if hidden else data

    before = b"".join(map(written, prompt))
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    seen = decoder.decode(before)
    ended = before.decode("utf-8", "replace")
    drop = len(ended) - len(seen)  # 1 if the prompt ends within a character
    assert tokenizer.table is not None
    strip = tokenizer.table.strips_space and not before
    steps = []
    for data in [*map(written, ids), None]:
        text = decoder.decode(b"", True) if data is None else decoder.decode(data)
        if text and drop:
            text, drop = text[1:], 0
            strip = False
        elif text and strip:
            text, strip = text.removeprefix(" "), False
        steps.append(text)
    return steps


def feed(detokenizer: IncrementalDetokenizer, portions: Sequence[Sequence[int]]) -> tuple[list[str], list[str]]:
    """(deltas, texts so far) as a stream would show them."""
    deltas, texts = [], []
    for number, portion in enumerate(portions):
        detokenizer.update(portion, number == len(portions) - 1)
        deltas.append(detokenizer.delta())
        texts.append(detokenizer.output_text)
    return deltas, texts


@pytest.mark.parametrize("name", [name for name in NAMES if name != "word_pieces"])
@given(data=st.data(), skip=st.booleans())
def test_any_portions_give_the_one_shot_text(
    name: str, opened: dict[str, Tokenizer], data: st.DataObject, skip: bool
) -> None:
    tokenizer = opened[name]
    prompt = data.draw(id_lists(tokenizer, 5))
    ids = data.draw(id_lists(tokenizer))
    portions = data.draw(st.composite(cut)(ids))
    params = SamplingParams(skip_special_tokens=skip)
    detokenizer = make_detokenizer(tokenizer, prompt, params)
    deltas, texts = feed(detokenizer, portions)
    steps = reference_steps(tokenizer, prompt, ids, skip)
    final = "".join(steps)
    assert texts[-1] == "".join(deltas) == final
    assert make_detokenizer(tokenizer, prompt, params).decode_all(ids) == final
    assert detokenizer.num_tokens_used == len(ids)
    assert detokenizer.stop is None
    given_so_far = 0
    for portion, text in zip(portions[:-1], texts, strict=False):
        given_so_far += len(portion)
        assert text == "".join(steps[:given_so_far])


@pytest.mark.parametrize("name", ["smollm2", "small_bytes", "word_pieces"])
@given(data=st.data(), skip=st.booleans())
def test_output_is_what_the_library_adds_to_the_prompt(
    name: str, opened: dict[str, Tokenizer], data: st.DataObject, skip: bool
) -> None:
    """The definition by the library's own decoder, where it writes one replacement character per maximal part."""
    tokenizer = opened[name]
    prompt, ids = data.draw(id_lists(tokenizer, 8)), data.draw(id_lists(tokenizer))

    def decode(ids: list[int]) -> str:
        return tokenizer.library.decode([i for i in ids if 0 <= i < 2**31 - 1], skip_special_tokens=skip)

    params = SamplingParams(skip_special_tokens=skip)
    expected = decode(prompt + ids)[len(decode(prompt)) :]
    if name == "word_pieces":  # its decoder looks at more than the neighbour: " ." becomes "."
        expected, prompt = decode(ids), []
    assert make_detokenizer(tokenizer, prompt, params).decode_all(ids) == expected


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_stop_strings(name: str, opened: dict[str, Tokenizer], data: st.DataObject) -> None:
    """Against a search of the whole text: earliest end, then longest; nothing of a stop string is ever shown."""
    tokenizer = opened[name]
    prompt, ids = data.draw(id_lists(tokenizer, 3)), data.draw(id_lists(tokenizer))
    if name == "word_pieces":
        one_by_one = make_detokenizer(tokenizer, prompt, SamplingParams())
        steps = feed(one_by_one, [[token_id] for token_id in ids] + [[]])[0]
    else:
        steps = reference_steps(tokenizer, prompt, ids, True)
    final = "".join(steps)
    parts = st.builds(
        lambda start, length: final[start : start + length],
        st.integers(0, max(0, len(final) - 1)),
        st.integers(1, 6),
    )
    stops = data.draw(
        st.lists(st.one_of(parts, st.text("abé€ \ufffd", max_size=4)).filter(bool), min_size=1, max_size=4)
    )
    min_tokens, include = data.draw(st.integers(0, 6)), data.draw(st.booleans())
    params = SamplingParams(stop=stops, min_tokens=min_tokens, max_tokens=None, include_stop_str_in_output=include)
    portions = data.draw(st.composite(cut)(ids))
    detokenizer = make_detokenizer(tokenizer, prompt, params)
    deltas, texts = feed(detokenizer, portions)

    start = len("".join(steps[: max(0, min_tokens - 1)]))
    if len(ids) < min_tokens:
        start = len(final)
    matches = [
        (at + len(stop), -len(stop), stop)
        for stop in stops
        for at in range(start, len(final) - len(stop) + 1)
        if final.startswith(stop, at)
    ]
    if not matches:
        assert detokenizer.stop is None
        assert texts[-1] == "".join(deltas) == final
        assert detokenizer.num_tokens_used == len(ids)
    else:
        end, _, stop = min(matches)
        assert detokenizer.stop == stop
        expected = final[: end if include else end - len(stop)]
        assert texts[-1] == "".join(deltas) == expected
        used = next(k for k in range(len(ids) + 1) if len("".join(steps[:k])) >= end or k == len(ids))
        assert detokenizer.num_tokens_used == used
    for text in texts:
        assert texts[-1].startswith(text)
    assert detokenizer.decode_all(ids) == final


def writable(tokenizer: Tokenizer, text: str) -> str:
    """The text without bytes that no token can write (SmolLM2's vocabulary lacks a few that begin rare characters)."""
    single = single_bytes(tokenizer)
    return bytes(byte for byte in text.encode() if bytes([byte]) in single).decode("utf-8", "replace")


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
@given(text=st.text(), prompt=st.text(max_size=5), skip=st.booleans())
def test_text_round_trip(name: str, opened: dict[str, Tokenizer], text: str, prompt: str, skip: bool) -> None:
    tokenizer = opened[name]
    text = text.replace("▁", "_")  # SentencePiece writes its own mark for a space
    ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer = make_detokenizer(tokenizer, tokenizer.encode(prompt), SamplingParams(skip_special_tokens=skip))
    deltas, _ = feed(detokenizer, [[token_id] for token_id in ids] + [[]])
    assert "".join(deltas) == detokenizer.decode_all(ids) == tokenizer.decode(ids, skip) == writable(tokenizer, text)


@pytest.mark.parametrize("name", ["smollm2", "gemma3", "small_bytes", "small_pieces_prefix"])
@given(data=st.data())
def test_the_library_path_agrees_with_the_table(name: str, opened: dict[str, Tokenizer], data: st.DataObject) -> None:
    tokenizer = opened[name]
    text = data.draw(st.text(max_size=12)) if name in ("smollm2", "gemma3") else "a ba bé a"
    text = writable(tokenizer, text)
    assume("\ufffd" not in text)
    ids = tokenizer.encode(text, add_special_tokens=False)
    prompt = tokenizer.encode("a b", add_special_tokens=False)
    slow = LibraryDetokenizer(without_table(tokenizer), prompt, True, True)
    fast = make_detokenizer(tokenizer, prompt, SamplingParams())
    portions = [[token_id] for token_id in ids] + [[]]
    assert feed(slow, portions)[1][-1] == feed(fast, portions)[1][-1]


def without_table(tokenizer: Tokenizer) -> Tokenizer:
    return Tokenizer(lambda: tokenizer.library, tokenizer.vocab_size, tokenizer.special, None)


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
@pytest.mark.parametrize("character", ["é", "€", "👍", "日本"])
@pytest.mark.parametrize("library", [False, True])
def test_prompt_that_ends_within_a_character(
    name: str, character: str, library: bool, opened: dict[str, Tokenizer]
) -> None:
    """The character belongs to the prompt, whether or not the output completes it."""
    tokenizer = opened[name]
    single = single_bytes(tokenizer)
    ids = [single[bytes([byte])] for byte in character.encode()]
    after = tokenizer.encode("abc", add_special_tokens=False)
    if library:
        tokenizer = without_table(tokenizer)
    for known in range(1, len(character[0].encode())):
        for output in (ids[known:] + after, after):
            detokenizer = make_detokenizer(tokenizer, after + ids[:known], SamplingParams())
            deltas, _ = feed(detokenizer, [[token_id] for token_id in output] + [[]])
            rest = character[1:] if output != after else ""
            assert "".join(deltas) == detokenizer.decode_all(output) == rest + "abc"


def test_incomplete_end_is_one_replacement_character(opened: dict[str, Tokenizer]) -> None:
    tokenizer = opened["gemma3"]
    first = tokenizer.token_to_id("<0xF0>")
    ids = [first, tokenizer.token_to_id("<0x9F>"), tokenizer.token_to_id("<0x98>")]
    detokenizer = make_detokenizer(tokenizer, [2], SamplingParams())
    for token_id in ids:
        detokenizer.update([token_id])
        assert detokenizer.output_text == detokenizer.delta() == ""
    detokenizer.update([], True)
    assert detokenizer.output_text == detokenizer.delta() == detokenizer.decode_all(ids) == "\ufffd"


def test_leading_space_depends_on_the_prompt(opened: dict[str, Tokenizer]) -> None:
    tokenizer = opened["small_pieces_prefix"]
    bos, word = tokenizer.bos_token_id, tokenizer.token_to_id("▁a")
    assert bos is not None
    assert word is not None
    for prompt, skip, expected in [
        ([bos], True, "a a"),  # nothing before it: the tokenizer's own prefix
        ([], True, "a a"),
        ([bos], False, " a a"),
        ([bos, word], True, " a a"),  # a continuation keeps its space
    ]:
        detokenizer = make_detokenizer(tokenizer, prompt, SamplingParams(skip_special_tokens=skip))
        deltas, _ = feed(detokenizer, [[word], [word], []])
        assert "".join(deltas) == detokenizer.decode_all([word, word]) == expected


def test_special_tokens_can_be_shown(opened: dict[str, Tokenizer]) -> None:
    tokenizer = opened["smollm2"]
    end = tokenizer.eos_token_id
    assert end is not None
    ids = [*tokenizer.encode("Hi"), end, end]
    for spaces in (True, False):
        params = SamplingParams(skip_special_tokens=False, spaces_between_special_tokens=spaces)
        assert make_detokenizer(tokenizer, [0], params).decode_all(ids) == "Hi<|im_end|><|im_end|>"
    assert make_detokenizer(tokenizer, [0], SamplingParams()).decode_all(ids) == "Hi"


def test_spaces_between_special_tokens_where_the_decoder_writes_them(opened: dict[str, Tokenizer]) -> None:
    tokenizer = opened["word_pieces"]
    ids = [6, 7, 2, 2, 1, 8]
    with_spaces = SamplingParams(skip_special_tokens=False)
    without = SamplingParams(skip_special_tokens=False, spaces_between_special_tokens=False)
    assert make_detokenizer(tokenizer, [], with_spaces).decode_all(ids) == "do not [SEP] [SEP] [CLS] it"
    assert make_detokenizer(tokenizer, [], without).decode_all(ids) == "do not [SEP][SEP][CLS] it"
    assert make_detokenizer(tokenizer, [], SamplingParams()).decode_all(ids) == "do not it"


def test_word_pieces_continue_the_prompt(opened: dict[str, Tokenizer]) -> None:
    tokenizer = opened["word_pieces"]
    assert make_detokenizer(tokenizer, [6, 3], SamplingParams()).decode_all([4, 5, 7]) == "ables not"
    assert make_detokenizer(tokenizer, [6], SamplingParams()).decode_all([3, 4]) == " unable"


def test_many_incomplete_tokens_stay_cheap_and_visible(opened: dict[str, Tokenizer]) -> None:
    """The library path gives a character up that will not be completed, so that its window stays short."""
    tokenizer = opened["small_pieces"]
    broken = tokenizer.token_to_id("<0xE2>")
    assert broken is not None
    slow = LibraryDetokenizer(without_table(tokenizer), [], True, True)
    slow.update([broken] * 100)
    assert slow.output_text
    assert set(slow.output_text) == {"\ufffd"}


def test_stop_string_across_tokens_and_portions(opened: dict[str, Tokenizer]) -> None:
    tokenizer = opened["smollm2"]
    ids = tokenizer.encode("The answer is 42. END of it")
    params = SamplingParams(stop=["END of", "2. EN"])
    detokenizer = make_detokenizer(tokenizer, [0], params)
    shown = []
    for token_id in ids:
        detokenizer.update([token_id])
        shown.append(detokenizer.delta())
    assert detokenizer.stop == "2. EN"
    assert "".join(shown) == "The answer is 4"
    used = detokenizer.num_tokens_used
    assert "2. EN" in tokenizer.decode(ids[:used])
    assert "2. EN" not in tokenizer.decode(ids[: used - 1])
    whole = make_detokenizer(tokenizer, [0], params)
    whole.update(ids, True)
    assert (whole.stop, whole.output_text, whole.num_tokens_used) == ("2. EN", "The answer is 4", used)


def test_longest_of_those_that_end_together(opened: dict[str, Tokenizer]) -> None:
    tokenizer = opened["small_bytes"]
    for stops in (["b", "ab", "aab"], ["aab", "ab", "b"]):
        detokenizer = make_detokenizer(tokenizer, [0], SamplingParams(stop=stops))
        detokenizer.update([0, 0, 1, 1])
        assert (detokenizer.stop, detokenizer.output_text, detokenizer.num_tokens_used) == ("aab", "", 3)


def test_what_was_held_back_is_shown_at_the_end(opened: dict[str, Tokenizer]) -> None:
    tokenizer = opened["small_bytes"]
    detokenizer = make_detokenizer(tokenizer, [0], SamplingParams(stop="aaab"))
    detokenizer.update([1, 0, 0])
    assert detokenizer.output_text == detokenizer.delta() == "b"
    detokenizer.update([], True)
    assert detokenizer.output_text == "baa"
    assert detokenizer.delta() == "aa"


def test_nothing_is_held_back_where_the_stop_string_stays(opened: dict[str, Tokenizer]) -> None:
    tokenizer = opened["small_bytes"]
    detokenizer = make_detokenizer(tokenizer, [0], SamplingParams(stop="aaab", include_stop_str_in_output=True))
    detokenizer.update([0, 0])
    assert detokenizer.delta() == "aa"
    detokenizer.update([2, 1])
    assert (detokenizer.delta(), detokenizer.output_text, detokenizer.stop) == ("ab", "aaab", "aaab")


def test_nothing_is_added_after_a_stop(opened: dict[str, Tokenizer]) -> None:
    tokenizer = opened["small_bytes"]
    detokenizer = make_detokenizer(tokenizer, [0], SamplingParams(stop="b"))
    detokenizer.update([0, 1, 0])
    detokenizer.update([0, 0], True)
    assert (detokenizer.output_text, detokenizer.num_tokens_used) == ("a", 2)


def test_min_tokens_boundary(opened: dict[str, Tokenizer]) -> None:
    """Text before token m is not searched, not even as the beginning of a match; token m's is."""
    tokenizer = opened["small_bytes"]
    a, b = 0, 1
    for min_tokens, used in [(0, 2), (1, 2), (2, 4), (3, 4), (4, None)]:
        detokenizer = make_detokenizer(tokenizer, [0], SamplingParams(stop="ab", min_tokens=min_tokens))
        detokenizer.update([a, b, a, b, b], True)
        assert (detokenizer.num_tokens_used if detokenizer.stop else None) == used, min_tokens


def test_no_text_without_detokenize(opened: dict[str, Tokenizer]) -> None:
    for detokenizer in (
        make_detokenizer(None, [1], SamplingParams()),
        make_detokenizer(opened["smollm2"], [1], SamplingParams(detokenize=False)),
    ):
        detokenizer.update([5, 6], True)
        assert (detokenizer.output_text, detokenizer.delta(), detokenizer.decode_all([5])) == ("", "", "")
        assert (detokenizer.stop, detokenizer.num_tokens_used) == (None, 2)


def test_stop_strings_need_text() -> None:
    with pytest.raises(BadRequestError, match="stop") as caught:
        make_detokenizer(None, [1], SamplingParams(stop="x"))
    assert caught.value.parameter == "stop"


def test_prompt_ids_may_be_an_array(opened: dict[str, Tokenizer]) -> None:
    tokenizer = opened["small_bytes"]
    prompt = np.array([0, 8, 9], np.int32)  # a, then two of the three bytes of €
    assert make_detokenizer(tokenizer, prompt, SamplingParams()).decode_all([10, 0]) == "a"


@given(text=st.text("ab", max_size=30), strings=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=5))
def test_automaton_knows_the_longest_beginning_at_the_end(text: str, strings: list[str]) -> None:
    automaton, state = StopAutomaton(strings), 0
    for end, letter in enumerate(text, 1):
        state = automaton.step(state, letter)
        beginnings = [k for s in strings for k in range(len(s) + 1) if text[:end].endswith(s[:k])]
        assert automaton.depth[state] == max(beginnings)
        ended = [s for s in strings if text[:end].endswith(s)]
        assert automaton.found[state] == (max(ended, key=len) if ended else None)


def test_detokenizers_share_nothing(opened: dict[str, Tokenizer]) -> None:
    tokenizer = opened["small_bytes"]
    params = SamplingParams(stop="ab")
    first, second = (make_detokenizer(tokenizer, [0], params) for _ in range(2))
    first.update([0])
    second.update([1])
    assert (first.output_text, second.output_text) == ("", "b")
    assert first.decode_all([0, 0]) == "aa"
    first.update([1])
    assert (first.stop, second.stop) == ("ab", None)
