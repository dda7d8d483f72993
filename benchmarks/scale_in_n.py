#!/usr/bin/env python3
"""What one request of n children costs as n grows: CPU time per token, steps, prompt tokens computed, memory per child.

    python benchmarks/scale_in_n.py [--model smollm2-135m-instruct] [--counts 1,10,100,1000,10000] [--threads 1]

CPU time of the process is counted, which other programs on the machine disturb less than the clock.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path

from vllm import LLM, SamplingParams


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--counts", default="1,10,100,1000,10000")
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", help="write the figures to this file too")
    args = parser.parse_args()
    counts = [int(count) for count in args.counts.split(",")]

    llm = LLM(args.model, max_model_len=2048, num_threads=args.threads, num_gpu_blocks_override=4096)
    prompt = [100 + 7 * position for position in range(args.prompt_len)]
    rows = []

    def generate(n: int) -> None:
        params = SamplingParams(n=n, max_tokens=args.output_len, ignore_eos=True)
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        assert sum(len(completion.token_ids) for completion in output.outputs) == n * args.output_len

    for n in (64, max(counts)):  # touches the buffers and the cache that every later run reuses
        generate(n)
    print(f"{'n':>7}{'CPU ms/token':>14}{'steps':>7}{'prompt tokens computed':>24}{'bytes kept/child':>18}")
    for n in counts:
        llm.reset_prefix_cache()
        gc.collect()
        before = llm.llm_engine.metrics.scheduler
        memory, cpu = resident_mib(), time.process_time()
        generate(n)
        cpu, memory = time.process_time() - cpu, resident_mib() - memory
        after = llm.llm_engine.metrics.scheduler
        row = {
            "n": n,
            "cpu_ms_per_token": cpu / n / args.output_len * 1e3,
            "steps": after.step - before.step,
            "prompt_tokens_computed": after.prompt_tokens_computed - before.prompt_tokens_computed,
            "bytes_per_child": max(0.0, memory) * 2**20 / n,
        }
        rows.append(row)
        print(
            f"{n:>7}{row['cpu_ms_per_token']:>14.2f}{row['steps']:>7}{row['prompt_tokens_computed']:>24}"
            f"{row['bytes_per_child']:>18.0f}",
            flush=True,
        )
    llm.shutdown()
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
