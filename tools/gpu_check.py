"""What only a card can show, in one run: `python tools/gpu_check.py --out gpu.json`.

Needs the packages of requirements/cuda.txt and of pyproject.toml, and no network; it names the missing ones. Every part
is run even if an earlier one failed, as long as the time (`--minutes`) lasts, and all figures go into one JSON.

    kernels     Triton kernels against fp64 and the reference sampler; a row's bits in any company
    engine      greedy tokens equal to the CPU engine's in fp32; seeded requests alone and in a crowd
    products    matrix products of Llama-3.2-3B's shapes, Triton against cuBLAS
    serving     dummy weights of that shape: throughput, latency, n = 64 of one prompt, a decode step's time

`--tune` measures the tiles of the matrix products instead and stores them for this card. `--small` is a rehearsal with
tiny sizes, which also runs in Triton's interpreter (TRITON_INTERPRET=1).

It has run in the interpreter only: no part of it has run on a card yet.
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib.util
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

NEEDED = ("numpy", "torch", "triton", "msgspec", "tokenizers", "jinja2", "zmq", "rich", "tqdm")
THROUGHPUT_GOAL, LATENCY_GOAL = 42.0, 2.47
"""Requests/s and P99 seconds: upstream's own record for this refactoring (128 in, 512 out)."""

LLAMA_3B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}
TINY = {
    **LLAMA_3B,
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
}


class Check:
    """The parts, and what they share."""

    def __init__(self, small: bool) -> None:
        import torch

        from vllm.kernels.triton.runtime import DEVICE

        self.small = small
        self.device = torch.device(DEVICE)
        self.folder = Path(tempfile.mkdtemp(prefix="gpu-check-"))

    # Kernels

    def kernels(self) -> dict[str, Any]:
        return {"gemm": self._gemm(), "decoder": self._decoder(), "sampling": self._sampling()}

    def _gemm(self) -> dict[str, Any]:
        import torch

        from benchmarks.kernel_cases import GEMM_CASES
        from vllm.kernels.triton.gemm import linear

        found = {}
        for case in [case for case in GEMM_CASES if not self.small or case.n * case.k < 20_000]:
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                x, w = (torch.from_numpy(part).to(self.device, dtype) for part in (case.rows(130), case.weights()))
                whole = linear(x, w)
                a, b = x.double(), w.double()
                error = (whole.double() - a @ b.T).abs() / ((a * a) @ (b * b).T).sqrt().clamp_min(1e-30)
                same = all(torch.equal(linear(x[:m], w), whole[:m]) for m in (1, 2, 13, 64))
                same &= all(torch.equal(linear(x[i : i + 1], w)[0], whole[i]) for i in (7, 77, 129))
                found[f"{case.name}, {str(dtype)[6:]}"] = {"largest_error": float(error.max()), "same_bits": same}
        return found

    def _decoder(self) -> dict[str, Any]:
        import numpy as np

        from benchmarks.kernel_cases import DECODER_CASES, batch, oracle
        from vllm.config import DeviceConfig
        from vllm.model_executor.backends.triton_backend import TritonBackend

        length = 40 if self.small else 610
        cut = length - 3
        found = {}
        for case in DECODER_CASES[: 1 if self.small else None]:
            for dtype in ("float32",) if self.small else ("float32", "bfloat16", "float16"):
                backend = TritonBackend(case.spec, dtype, DeviceConfig(device=self.device.type))
                backend.load_weights(case.tensors())
                backend.init_cache(128, 16)
                tokens = np.random.default_rng(0).integers(0, case.spec.vocab_size, length).tolist()
                tables = np.random.default_rng(1).permutation(128)[None, : -(-length // 16)].astype(np.int32)
                every = np.arange(length, dtype=np.int32)
                whole = backend.logits(backend.forward(batch([tokens], [0], tables)), every)
                expected = oracle(case.spec, case.weights(), tokens, bf16=dtype == "bfloat16")
                error = np.abs(whole - expected) / expected.std(1, keepdims=True)
                parts = [backend.logits(backend.forward(batch([tokens[:cut]], [0], tables)), every[:cut])]
                for start in range(cut, length):  # decode: from graphs, the second time on
                    for _ in range(2):
                        row = backend.logits(
                            backend.forward(batch([tokens[start : start + 1]], [start], tables)), every[:1]
                        )
                    parts.append(row)
                backend.close()
                found[f"{case.name}, {dtype}"] = {
                    "largest_error": float(error.max()),
                    "root_mean_square": float(np.sqrt((error**2).mean())),
                    "chunks_and_decode_same_bits": bool(np.array_equal(np.concatenate(parts), whole)),
                }
        return found

    def _sampling(self) -> dict[str, Any]:
        import numpy as np
        import torch

        from benchmarks.sampling_cases import CASES, logits_for
        from vllm.kernels.triton import sampler
        from vllm.v1.sample import reference

        vocab = 37 if self.small else 128_256
        found = {}
        for case in CASES[: 3 if self.small else None]:
            rows = 1 if case.per_row > 1 else 2
            logits, batch = logits_for(rows, vocab), case.batch(rows, vocab)
            made = sampler.sample(lambda part, given=logits: torch.from_numpy(given[part]).to(self.device), batch, 256)
            wanted = reference.sample(logits, batch)
            entry: dict[str, Any] = {"draws": batch.size, "equal": int((made.token_ids == wanted.token_ids).sum())}
            if made.logprobs is not None and wanted.logprobs is not None:
                entry["logprobs_equal"] = bool(np.array_equal(made.logprobs.logprobs, wanted.logprobs.logprobs))
                entry["ids_equal"] = bool(np.array_equal(made.logprobs.token_ids, wanted.logprobs.token_ids))
            found[case.name] = entry
        return found

    # Engine

    def _llm(self, config: dict[str, Any], on_card: bool = True, **options: Any) -> Any:
        from vllm import LLM

        (self.folder / "config.json").write_text(json.dumps(config))
        place = {"device": self.device.type, "backend": "triton"} if on_card else {"device": "cpu", "backend": "torch"}
        if self.small or not on_card:
            options.setdefault("num_gpu_blocks_override", 512)
        settings = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 2048, **place, **options}
        return LLM(str(self.folder), **settings)

    def engine(self) -> dict[str, Any]:
        import numpy as np

        from vllm import SamplingParams

        rng = np.random.default_rng(0)
        count, longest, new = (3, 12, 3) if self.small else (24, 600, 48)
        lengths = rng.integers(1, longest, count).tolist()
        prompts = [{"prompt_token_ids": rng.integers(0, 300, length).tolist()} for length in lengths]
        greedy = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        seeded = [
            SamplingParams(n=1 + i % 3, seed=i, max_tokens=new, ignore_eos=True, logprobs=2, top_p=0.9)
            for i in range(count)
        ]

        def tokens(outputs: list[Any]) -> list[list[list[int]]]:
            return [[list(child.token_ids) for child in output.outputs] for output in outputs]

        def numbers(output: Any) -> Any:
            return [
                [[(i, entry.logprob) for i, entry in step.items()] for step in child.logprobs]
                for child in output.outputs
            ]

        cpu = self._llm(TINY, on_card=False, dtype="float32")
        expected = tokens(cpu.generate(prompts, greedy, use_tqdm=False))
        cpu.shutdown()
        card = self._llm(TINY, dtype="float32")
        found = tokens(card.generate(prompts, greedy, use_tqdm=False))
        crowd = card.generate(prompts, seeded, use_tqdm=False)
        few = range(0, count, 4)
        alone = [card.generate([prompts[i]], [seeded[i]], use_tqdm=False)[0] for i in few]
        card.shutdown()
        pairs = [(one, crowd[i]) for i, one in zip(few, alone, strict=True)]
        same = [tokens([one]) == tokens([other]) and numbers(one) == numbers(other) for one, other in pairs]
        return {
            "greedy_requests": count,
            "greedy_equal_to_cpu": sum(a == b for a, b in zip(found, expected, strict=True)),
            "seeded_requests": len(same),
            "seeded_alone_equal_in_a_crowd": sum(same),
        }

    # Speed

    def _seconds(self, call: Callable[[], Any], repeats: int = 20) -> float:
        """Of one call on the device, the mean of `repeats`."""
        import torch

        call()
        if self.device.type == "cpu":
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            call()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / repeats

    def _shapes(self) -> dict[str, tuple[int, int]]:
        model = TINY if self.small else LLAMA_3B
        hidden, inner, dim = (int(model[name]) for name in ("hidden_size", "intermediate_size", "head_dim"))  # type: ignore[call-overload]
        heads, kv = int(model["num_attention_heads"]), int(model["num_key_value_heads"])  # type: ignore[call-overload]
        return {
            "qkv": ((heads + 2 * kv) * dim, hidden),
            "o": (hidden, heads * dim),
            "gate_up": (2 * inner, hidden),
            "down": (hidden, inner),
            "head": (int(model["vocab_size"]), hidden),  # type: ignore[call-overload]
        }

    def products(self) -> dict[str, Any]:
        import torch

        from vllm.kernels.triton.gemm import linear

        found = {}
        for name, (n, k) in self._shapes().items():
            w = torch.randn(n, k, device=self.device).bfloat16()
            for m in (1, 4) if self.small else (1, 64, 256, 2048):
                x = torch.randn(m, k, device=self.device).bfloat16()
                ours = self._seconds(lambda x=x, w=w: linear(x, w))
                theirs = self._seconds(lambda x=x, w=w: torch.nn.functional.linear(x, w))
                found[f"{name} {m}x{n}x{k}"] = {
                    "triton_us": ours * 1e6,
                    "cublas_us": theirs * 1e6,
                    "triton_tflops": 2e-12 * m * n * k / ours,
                    "triton_gb_per_s": 2e-9 * n * k / ours,
                }
        return found

    def tune(self) -> dict[str, Any]:
        """Of each shape the fastest tile over a decode step's rows (64, 256) and a prefill's (2,048), weighed alike."""
        import torch

        from vllm.kernels.triton import tiles
        from vllm.kernels.triton.gemm import card_of, linear

        table = {}
        for n, k in self._shapes().values():
            w = torch.randn(n, k, device=self.device).bfloat16()
            xs = [torch.randn(m, k, device=self.device).bfloat16() for m in ((4,) if self.small else (64, 256, 2048))]
            times: dict[tiles.Tile, list[float]] = {}
            for tile in tiles.CANDIDATES[: 2 if self.small else None]:
                try:
                    times[tile] = [self._seconds(lambda x=x, w=w, t=tile: linear(x, w, None, t), 10) for x in xs]
                except Exception as error:  # noqa: BLE001 - a tile that does not fit the card is passed over
                    print(f"{n}x{k} {tile}: {error}", file=sys.stderr)
            best = [min(column) for column in zip(*times.values(), strict=True)]
            table[n, k, 2] = min(times, key=lambda t: sum(a / b for a, b in zip(times[t], best, strict=True)))
        if not self.small:
            tiles.save(card_of(self.device), table)
        return {f"{n}x{k}": list(tile) for (n, k, _), tile in table.items()}

    def serving(self) -> dict[str, Any]:
        import numpy as np
        import torch

        from vllm import SamplingParams

        rng = np.random.default_rng(0)
        model = TINY if self.small else LLAMA_3B
        requests, prompt, new = (3, 6, 3) if self.small else (1000, 128, 512)
        start = time.perf_counter()
        llm = self._llm(model, dtype="bfloat16", max_num_seqs=16 if self.small else 512, enable_prefix_caching=False)
        found: dict[str, Any] = {"load_s": time.perf_counter() - start}

        def prompts(count: int, length: int) -> list[dict[str, list[int]]]:
            vocab = int(model["vocab_size"])  # type: ignore[call-overload]
            return [{"prompt_token_ids": ids} for ids in rng.integers(0, vocab, (count, length)).tolist()]

        def timed(count: int, length: int, tokens: int, n: int = 1) -> float:
            given = prompts(count, length)
            params = SamplingParams(n=n, max_tokens=tokens, ignore_eos=True, seed=1)
            begin = time.perf_counter()
            llm.generate(given, params, use_tqdm=False)
            return time.perf_counter() - begin

        timed(requests if self.small else 512, prompt, 2 if self.small else 8)  # compiles; the graphs of the sizes met
        seconds = timed(requests, prompt, new)
        found["throughput"] = {
            "requests_per_s": requests / seconds,
            "output_tokens_per_s": requests * new / seconds,
            "goal_requests_per_s": THROUGHPUT_GOAL,
        }
        timed(8, prompt, 2)
        batches = sorted(timed(8 if not self.small else 1, prompt, new) for _ in range(2 if self.small else 10))
        found["latency"] = {
            "batch": 8,
            "seconds": batches,
            "p99_s": float(np.percentile(batches, 99)),
            "goal_s": LATENCY_GOAL,
        }
        length, n, tokens = (20, 3, 2) if self.small else (1024, 64, 128)
        for _ in range(2):  # the first compiles
            shared, apart = timed(1, length, tokens, n), timed(n, length, tokens)
        found["n_of_one_prompt"] = {"n": n, "prompt": length, "shared_s": shared, "apart_s": apart}
        timed(1, prompt, 4)
        steps = 2 if self.small else 128
        one = (timed(1, prompt, steps + 1) - timed(1, prompt, 1)) / steps
        found["decode_step"] = {"batch": 1, "seconds": one, **self._bandwidth(llm, one)}
        llm.shutdown()
        if self.device.type == "cuda":
            found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        return found

    def _bandwidth(self, llm: Any, step: float) -> dict[str, float]:
        """The weights' bytes over what the card copies per second: the least that a decode step can take."""
        import torch

        backend = llm.llm_engine.model_executor.driver_worker.model_runner.backend
        size = sum(matrix.numel() * matrix.element_size() for matrix in backend._matrices.values())
        source = torch.empty(1 << (20 if self.small else 30), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        rate = 2 * source.numel() / self._seconds(lambda: target.copy_(source))
        return {
            "weights_bytes": size,
            "copy_bytes_per_s": rate,
            "limit_s": size / rate,
            "of_the_limit": size / rate / step,
        }


def missing_packages() -> list[str]:
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def main(arguments: list[str] | None = None) -> int:
    """0: every part ran; 1: one failed or there was no time for it; 2: it cannot run here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the JSON (default: printed only)")
    parser.add_argument("--parts", default="kernels,engine,products,serving", help="which, in this order")
    parser.add_argument("--minutes", type=float, default=6.0, help="no part is begun after this time")
    parser.add_argument("--tune", action="store_true", help="measure and store this card's tiles; nothing else")
    parser.add_argument("--small", action="store_true", help="a rehearsal with tiny sizes")
    options = parser.parse_args(arguments)
    missing = missing_packages()
    if missing:
        print(f"missing packages: {', '.join(missing)} (requirements/cuda.txt, pyproject.toml)", file=sys.stderr)
        return 2
    import torch
    import triton

    from vllm.kernels.triton.runtime import unavailable

    reason = unavailable()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 2
    result: dict[str, Any] = {
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "none: Triton's interpreter",
        "date": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "small": options.small,
        "parts": {},
    }
    check = Check(options.small)
    begin = time.monotonic()
    status = 0
    for name in ["tune"] if options.tune else options.parts.split(","):
        start = time.monotonic()
        if start - begin > options.minutes * 60:
            result["parts"][name] = {"error": "no time left"}
            status = 1
            continue
        try:
            part = getattr(check, name)()
        except Exception:  # noqa: BLE001 - the other parts still run
            part = {"error": traceback.format_exc()}
            status = 1
        result["parts"][name] = {**part, "wall_s": time.monotonic() - start}
        print(f"{name}: {'failed' if 'error' in part else 'done'} in {time.monotonic() - start:.1f} s", file=sys.stderr)
        if options.out is not None:  # after every part, so that a stop loses little
            options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return status


if __name__ == "__main__":
    sys.exit(main())
