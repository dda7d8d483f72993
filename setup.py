"""Builds the CPU kernels with CMake where a C++ compiler is found; everything else stands in pyproject.toml.

The libraries have a C ABI and are loaded by ctypes, so one wheel (py3-none-<platform>) serves every Python. torch is no
part of the build. VLLM_BUILD_KERNELS=0 leaves the kernels out; without them the engine runs on the torch backend.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
LIBRARIES = Path("vllm", "_lib")


@functools.cache
def tool(name: str) -> str | None:
    """The first program of that name on PATH that runs. In a build environment, one that pip put into the caller's
    environment is on PATH but cannot find its own module."""
    for folder in os.get_exec_path():
        path = shutil.which(name, path=folder)
        if path and subprocess.run([path, "--version"], check=False, capture_output=True).returncode == 0:
            return path
    return None


def why_not() -> str | None:
    """Why the kernels cannot be built here; None if they can."""
    if os.environ.get("VLLM_BUILD_KERNELS") == "0":
        return "VLLM_BUILD_KERNELS=0"
    if not sys.platform.startswith("linux"):
        return f"they are not built on {sys.platform}"
    if not any(shutil.which(name) for name in (os.environ.get("CXX"), "c++", "g++", "clang++") if name):
        return "no C++ compiler was found (Debian and Ubuntu: apt-get install g++)"
    return None


class BuildKernels(build_ext):
    """Runs CMake, which installs vllm/_lib/libvllm_cpu_<isa>.so: into the source tree, or into the wheel."""

    def run(self) -> None:
        in_tree = self.inplace or self.editable_mode
        prefix = ROOT if in_tree else Path(self.build_lib).resolve()
        build = ROOT / "build" / "kernels"
        cmake, ninja = tool("cmake"), tool("ninja")
        if cmake is None:
            raise SystemExit(
                "cmake was not found; install it, or set VLLM_BUILD_KERNELS=0 to do without the CPU kernels"
            )
        generator = "Ninja" if ninja else "Unix Makefiles"
        cache = build / "CMakeCache.txt"
        if cache.exists() and not _fits(cache, generator):
            shutil.rmtree(build)
        chosen = ["-G", generator] + ([f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else [])
        jobs = os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))
        for command in (
            [cmake, "-S", str(ROOT), "-B", str(build), "-DCMAKE_BUILD_TYPE=Release", *chosen],
            [cmake, "--build", str(build), "--parallel", jobs],
            [cmake, "--install", str(build), "--prefix", str(prefix)],
        ):
            if subprocess.run(command, check=False).returncode:
                raise SystemExit(
                    f"building the CPU kernels failed at: {' '.join(command)}\n"
                    "Set VLLM_BUILD_KERNELS=0 to install without them (the engine then needs torch)."
                )

    def get_outputs(self) -> list[str]:
        folder = Path(self.build_lib) / LIBRARIES
        return [str(path) for path in sorted(folder.glob("*.so"))]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class PlatformWheel(bdist_wheel):
    """One wheel for every Python, since nothing in it links against Python."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return "py3", "none", platform


def _fits(cache: Path, generator: str) -> bool:
    """Whether an earlier configuration was for this folder and this generator; CMake refuses to change either."""
    recorded = dict(line.split("=", 1) for line in cache.read_text().splitlines() if "=" in line)
    return (
        recorded.get("CMAKE_HOME_DIRECTORY:INTERNAL") == str(ROOT)
        and recorded.get("CMAKE_GENERATOR:INTERNAL") == generator
    )


reason = why_not()
if reason is not None:
    print(f"WARNING: the CPU kernels are left out: {reason}. The engine then needs torch.", file=sys.stderr)

setup(
    ext_modules=[] if reason is not None else [Extension("vllm._lib.kernels", sources=[])],
    cmdclass={"build_ext": BuildKernels} | ({} if reason is not None else {"bdist_wheel": PlatformWheel}),
    # Asked for only where they are needed and missing: pip puts them into the build environment.
    setup_requires=[] if reason is not None or tool("cmake") else ["cmake>=3.18", "ninja"],
)
