"""Makes bundled_expected.json beside it: the bundled models' ids for texts, by transformers' own reading of the files.

transformers takes a quarter of a minute for Gemma's vocabulary, which is why the tests read the results from here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import transformers

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent.parent))
from tests.tokenizers.corpus import CORPUS, DIGITS, SENTENCES
from vllm.model_executor.loader import resolve_model


def main() -> None:
    expected = {}
    for name in ("smollm2-135m-instruct", "gemma3-270m"):
        path = resolve_model(name)
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
        expected[name] = [[text, tokenizer.encode(text)] for text in CORPUS + SENTENCES + DIGITS]
    (HERE / "bundled_expected.json").write_text(json.dumps(expected, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    main()
