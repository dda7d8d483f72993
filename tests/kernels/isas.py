"""The kernel variants that are built and run here."""

from __future__ import annotations

from vllm.kernels import library


def built_isas() -> list[str]:
    try:
        return [isa for isa in library.supported_isas() if library.library_path(isa).is_file()]
    except library.KernelLibraryError:
        return []


ISAS = built_isas()
NOT_BUILT = "the CPU kernels are not built (no compiler here)"
