#!/usr/bin/env python3
"""Compile the Triton kernels that runs launch for a GPU that this host lacks; print their registers, spills and shared memory.

    python3 scripts/kernels/compile.py configs/benchmarks/b8.yaml
    python3 scripts/kernels/compile.py configs/benchmarks/b1.yaml configs/benchmarks/b3.yaml -- --fp8-format hybrid

A run's dry run passes through its step on the meta device: every launch compiles the kernel with the types, constants and options
of the run. It needs Triton (`pip install triton`, which needs no GPU); Triton caches what it compiles (TRITON_CACHE_DIR).
A kernel that does not compile ends the script with Triton's error and the launch. The exit code is 1 if a kernel needs more
shared memory than a block can have.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from megatrain.config import parse
from megatrain.config.environment import LaunchEnvironment
from megatrain.kernels import fused
from megatrain.training.planning.dry_run import examine
from megatrain.training.planning.meta_step import patched

MAX_SHARED_BYTES = {80: 166_912, 90: 232_448, 100: 232_448}
"""Most shared memory of a block, by compute capability: 163 and 227 KiB."""


@dataclass(frozen=True)
class Compiled:
    """A kernel for one combination of types, constants and options."""

    kernel: JITFunction
    constants: str
    registers: int
    spilled_bytes: int
    """Local memory of a thread."""
    shared_bytes: int

    def __str__(self) -> str:
        module = self.kernel.fn.__module__.removeprefix("megatrain.kernels.fused.")
        sizes = f"{self.registers:9} {self.spilled_bytes:7} {self.shared_bytes / 1024:7.1f}"
        return f"{sizes}  {module}.{self.kernel.fn.__name__} {self.constants}"


class CompileOnly:
    """Stand-in for Triton's driver, for a GPU that is not there."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # Triton caches kernels by device

    def get_current_stream(self, _device: int) -> int:
        return 0


@contextlib.contextmanager
def compiling_launches(capability: int) -> Iterator[list[Compiled]]:
    """Inside the context launches compile their kernel and do not run it; yield the list to which they add it."""
    found: dict[int, Compiled] = {}
    results: list[Compiled] = []
    before = driver._active  # noqa: SLF001
    names = [module.name for module in pkgutil.walk_packages(fused.__path__, f"{fused.__name__}.")]
    modules = [module for module in map(importlib.import_module, names) if hasattr(module, "is_fake")]

    def compile_launch(
        kernel: JITFunction, *arguments: Any, grid: Any, warmup: bool, **constants: Any
    ) -> None:
        del warmup
        try:
            compiled = run(kernel, *arguments, grid=grid, warmup=True, **constants)
        except Exception as error:
            error.add_note(f"{kernel.fn.__module__}.{kernel.fn.__name__}, launched with {constants}")
            raise
        if id(compiled) not in found:
            words = ", ".join(f"{name}={value}" for name, value in constants.items())
            found[id(compiled)] = Compiled(kernel, words, *_resources(compiled), compiled.metadata.shared)
            results.append(found[id(compiled)])

    run = JITFunction.run
    try:
        driver.set_active(CompileOnly(capability))
        has_memory = [(module, "is_fake", lambda _: False) for module in modules]
        with patched((JITFunction, "run", compile_launch), *has_memory):
            yield results
    finally:
        driver._active = before  # noqa: SLF001


def _resources(compiled: Any) -> tuple[int, int]:
    """Return the registers and the bytes of local memory of a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (numbers,) = re.findall(r"REG:(\d+) STACK:(\d+)", text)
    return int(numbers[0]), int(numbers[1])


def compile_run(words: list[str], capability: int) -> list[Compiled]:
    """Return the kernels of a run, given its command line."""
    with compiling_launches(capability) as compiled:
        examine(parse([*words, "--dry-run", "--assume-gpu", "h200"]), LaunchEnvironment())
    return compiled


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("configs", nargs="+", help="YAML files of runs")
    parser.add_argument("--capability", type=int, choices=MAX_SHARED_BYTES, default=90, help="default: 90")
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    arguments = parser.parse_args(words[:end])
    print(f"torch {torch.__version__}, sm_{arguments.capability}\nregisters spilled  KiB shared")
    code = 0
    for config in arguments.configs:
        for compiled in compile_run(["--config", config, *words[end + 1 :]], arguments.capability):
            print(compiled)
            if compiled.shared_bytes > MAX_SHARED_BYTES[arguments.capability]:
                print(f"  more than the {MAX_SHARED_BYTES[arguments.capability] / 1024:.0f} KiB of a block")
                code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())
