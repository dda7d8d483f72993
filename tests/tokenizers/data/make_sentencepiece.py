"""Makes spm_*.model and spm_expected.json beside it: small models by SentencePiece itself, and what it says of texts.

Run it in an environment with the `sentencepiece` package (0.2.3 made the files here); the tests need only the files.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import sentencepiece

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent.parent))
from tests.tokenizers.corpus import CORPUS, DIGITS, SENTENCES

EXTRA = ["use <tool> now<tool>", "x <b> y  <b>", "The tokenizer shares   nothing 123"]


def main() -> None:
    os.chdir(HERE)  # the model file names its input
    lines = [line.replace("\n", " ").replace("\r", "").replace("\x00", "") for line in SENTENCES * 6 + CORPUS + DIGITS]
    (HERE / "train.txt").write_text("\n".join(line for line in lines if line.strip()), encoding="utf-8")
    expected = {}
    for name in ("prefix", "plain"):
        sentencepiece.SentencePieceTrainer.train(
            input="train.txt",
            model_prefix=f"spm_{name}",
            model_type="bpe",
            vocab_size=900,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            split_digits=True,
            allow_whitespace_only_pieces=True,
            add_dummy_prefix=name == "prefix",
            user_defined_symbols=["<tool>", "<b>"] if name == "prefix" else ["<tool>", "<b>", "\n\n", "▁▁", "▁▁▁▁"],
            control_symbols=["<end>"],
            character_coverage=0.98,
            pad_id=3,
            num_threads=1,
        )
        (HERE / f"spm_{name}.vocab").unlink()
        processor = sentencepiece.SentencePieceProcessor(model_file=str(HERE / f"spm_{name}.model"))
        texts = [*CORPUS, *DIGITS, *EXTRA, *SENTENCES]
        expected[name] = [[text, processor.encode(text), processor.decode(processor.encode(text))] for text in texts]
    (HERE / "train.txt").unlink()
    (HERE / "spm_expected.json").write_text(json.dumps(expected, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    main()
