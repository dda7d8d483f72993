"""Times `LLM.generate` in whatever environment runs this file: it uses nothing of the package but the public API.

`compare` starts it under two interpreters and lets them measure in turn. It reads JSON lines from standard input, first
`{"engine": {keyword: value}}`, then `{"case": "4x8:512:128", "seed": 1}` (prompts x n : prompt tokens : output tokens)
as often as one likes, and answers each with a line. What the engine prints goes to standard error.
"""

import json
import os
import random
import sys
import time


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever an engine prints must not stand between the answers

    def answer(**fields: object) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    start = time.perf_counter()
    try:
        engine = json.loads(sys.stdin.readline())["engine"]
        import vllm
        from vllm import LLM, SamplingParams

        llm = LLM(**engine)
    except Exception as error:  # noqa: BLE001 - the other side tells the user
        answer(error=f"{type(error).__name__}: {error}")
        return
    answer(ready=time.perf_counter() - start, version=str(getattr(vllm, "__version__", "?")))
    for line in sys.stdin:
        asked = json.loads(line)
        prompts, n, prompt_len, output_len = parse_case(asked["case"])
        rng = random.Random(asked["seed"])
        batch = [{"prompt_token_ids": [rng.randrange(100, 40000) for _ in range(prompt_len)]} for _ in range(prompts)]
        params = SamplingParams(n=n, temperature=1.0, max_tokens=output_len, ignore_eos=True)
        try:
            begun = time.perf_counter()
            outputs = llm.generate(batch, params, use_tqdm=False)  # type: ignore[arg-type]
            seconds = time.perf_counter() - begun
        except Exception as error:  # noqa: BLE001
            answer(error=f"{type(error).__name__}: {error}")
            continue
        answer(seconds=seconds, tokens=sum(len(child.token_ids) for output in outputs for child in output.outputs))


def parse_case(case: str) -> "tuple[int, int, int, int]":
    """`4x8:512:128` as numbers. Raises ValueError."""
    shape, prompt_len, output_len = case.split(":")
    prompts, n = shape.split("x")
    numbers = int(prompts), int(n), int(prompt_len), int(output_len)
    if min(numbers) < 1:
        raise ValueError(case)
    return numbers


if __name__ == "__main__":
    main()
