"""How byte-level vocabularies split text before merging: by the names that GGUF files use in `tokenizer.ggml.pre`.

The patterns are those of the models' own published tokenizer files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vllm.exceptions import TokenizerError

if TYPE_CHECKING:
    from tokenizers import pre_tokenizers

NFC_GROWTH = 3
"""Composing characters makes a text at most three times shorter (a Hangul syllable of three letters)."""

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SLASH_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

_LLAMA3 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
_TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|{_SLASH_TAIL}"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}|{_SLASH_TAIL}"
)
_V3_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_V3 = (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _V3_WORDS)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")


class PreTokenizer(NamedTuple):
    """One way of splitting. Without patterns it is GPT-2's own."""

    patterns: tuple[str, ...] = ()
    single_digits: bool = False
    nfc: bool = False
    """The text is brought to Unicode's composed form first."""
    ignore_merges: bool = False
    """A word that is a token is taken whole, whether or not merges lead to it."""
    adds_bos: bool = False
    """What a file that does not say means by it."""

    def build(self) -> pre_tokenizers.PreTokenizer:
        from tokenizers import Regex, pre_tokenizers

        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.single_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        steps += [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not self.patterns))
        return steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)


_GPT2 = PreTokenizer()
_DIGITS = PreTokenizer(single_digits=True)
_LLAMA_BPE = PreTokenizer((_LLAMA3,), ignore_merges=True, adds_bos=True)

PRETOKENIZERS: dict[str, PreTokenizer] = {
    "": _GPT2,
    "default": _GPT2,
    "gpt-2": _GPT2,
    "gpt2": _GPT2,
    "phi-2": _GPT2,
    "olmo": _GPT2,
    "mpt": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "qwen2": PreTokenizer((_QWEN2,), nfc=True),
    "deepseek-r1-qwen": PreTokenizer((_QWEN2,)),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, adds_bos=True),
    "gpt-4o": PreTokenizer((_O200K,)),
    "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER),
    "deepseek-v3": PreTokenizer(_DEEPSEEK_V3),
}


def find_pretokenizer(name: str) -> PreTokenizer:
    """Raises TokenizerError naming an unknown one: a wrong split gives wrong tokens without any other sign."""
    found = PRETOKENIZERS.get(name)
    if found is None:
        known = ", ".join(key for key in PRETOKENIZERS if key)
        raise TokenizerError(
            f"unknown pre-tokenizer {name!r} (tokenizer.ggml.pre); known are {known}. "
            "Pass tokenizer= with a folder that has the model's tokenizer.json."
        )
    return found
