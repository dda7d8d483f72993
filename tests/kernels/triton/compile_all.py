"""Compiles every kernel for a card without one: `python compile_all.py 90 [name …]`. Prints a line per kernel: name,
bytes of shared memory, whether it has fused multiply-adds. Run by a test in a process of its own, since Triton decides
at its import whether it interprets."""

from __future__ import annotations

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm.kernels.triton import attention, elementwise, gemm, sampling_kernels

POINTERS = {
    **dict.fromkeys(("x_ptr", "w_ptr", "q_ptr", "k_ptr", "v_ptr", "k_cache_ptr", "v_cache_ptr"), "*bf16"),
    **dict.fromkeys(
        "positions_ptr tables_ptr tasks_ptr slots_ptr merged_ptr rows_ptr draws_ptr argmax_ptr status_ptr greedy_ptr "
        "tokens_ptr ranks_ptr top_k_ptr ids_ptr allowed_ptr offsets_ptr counts_ptr prompt_ptr output_ptr".split(),
        "*i32",
    ),
}
SAMPLING = {"w_ptr": "*fp32", "positions_ptr": "*i64", "seeds_ptr": "*i64"}
FLOATS = ("scale", "softcap", "eps")
HEADS = {"HEADS": 24, "KV_HEADS": 8, "DIM": 128, "DIM_BLOCK": 128, "BLOCK_SIZE": 16, "KEYS": 64, "ROWS": 16}
ATTEND = [
    (attention._attend, {**HEADS, "SPLIT": split, "HAS_SOFTCAP": special, "HAS_WINDOW": special}, {"out_ptr": "*bf16"})
    for split in (False, True)
    for special in (False, True)
]
NORM = {"x_ptr": "*fp32", "out_ptr": "*bf16"}
ROPE = {"ROWS": 1, "HEADS": 24, "KV_HEADS": 8, "DIM": 128, "BLOCK": 128, "HALF": 64}
KERNELS: list[tuple[Any, dict[str, Any], dict[str, str]]] = [
    (gemm._gemm, {"ROWS": 64, "COLUMNS": 64, "DEPTH": 64, "HAS_BIAS": True}, {}),
    (gemm._gemm, {"ROWS": 64, "COLUMNS": 32, "DEPTH": 32, "HAS_BIAS": False}, {"x_ptr": "*fp32", "w_ptr": "*fp32"}),
    (gemm._add_parts, {"PARTS": 4, "BLOCK": 1024}, {}),
    (elementwise._add_norm, {"ROWS": 1, "BLOCK": 4096, "ADD": True, "ADD_NORM": True}, NORM),
    (elementwise._add_norm, {"ROWS": 1, "BLOCK": 4096, "ADD": False, "ADD_NORM": False}, NORM),
    (elementwise._rope_cache, {**ROPE, "NORM": True}, {"q_ptr": "*bf16"}),
    (elementwise._rope_cache, {**ROPE, "NORM": False}, {"q_ptr": "*bf16"}),
    *((elementwise._gate, {"ROWS": 1, "ACTIVATION": name, "BLOCK": 1024}, NORM) for name in elementwise.ACTIVATIONS),
    *ATTEND,
    (
        attention._merge_parts,
        {"HEADS": 24, "HEADS_BLOCK": 32, "DIM": 128, "DIM_BLOCK": 128, "HAS_WINDOW": True},
        {"out_ptr": "*bf16"},
    ),
    *(
        (getattr(sampling_kernels, name), {"BLOCK": 8192}, SAMPLING)
        for name in "row_stats weigh keep_top_k keep_top_p rank edit_mask edit_banned count_ids penalize".split()
    ),
    (sampling_kernels.edit_bias, {}, SAMPLING),
    (sampling_kernels.sum_blocks, {"BLOCKS": 8}, SAMPLING),
    (sampling_kernels.accumulate, {"LANES": 32}, SAMPLING),
    (sampling_kernels.search, {"LANES": 32}, SAMPLING),
]


def main(capability: int, names: list[str]) -> None:
    for kernel, constants, types in KERNELS:
        if names and kernel.__name__ not in names:
            continue
        signature = {}
        for name in kernel.arg_names:
            if name in constants:
                signature[name] = "constexpr"
            elif name.endswith("_ptr"):
                signature[name] = types.get(name, POINTERS.get(name, "*fp32"))
            else:
                signature[name] = "fp32" if name in FLOATS else "i32"
        places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        source = ASTSource(fn=kernel, signature=signature, constexprs=places)
        options = {"num_warps": 4, "enable_fp_fusion": False}
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        text = made.asm["ptx"]
        assert f"target sm_{capability}" in text
        print(kernel.__name__, made.metadata.shared, "fma.rn.f32" in text, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
