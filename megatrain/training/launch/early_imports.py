"""Import of flash-attn-4 during start-up, if attention uses it; caches of compiled kernels.

    plan ─> enable the kernel cache ─> import in a thread, while process groups are created and weights drawn

flash-attn-4 caches compiled kernels in FLASH_ATTENTION_CUTE_DSL_CACHE_DIR if ..._CACHE_ENABLED is 1 (its cache_utils.py).
Triton always does, in TRITON_CACHE_DIR or ~/.triton/cache, and needs the folder. An error in the thread is raised again where
the library is first used.
"""

from __future__ import annotations

import contextlib
import fcntl
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from megatrain.config import Plan
from megatrain.config.environment import set_unless_given, triton_cache, user_cache
from megatrain.config.errors import ConfigError
from megatrain.kernels.attention.flash4 import flash4

_CACHE = "FLASH_ATTENTION_CUTE_DSL_CACHE"
_SWITCH_INTERVAL_SECONDS = 1e-4
"""Longest time that the import keeps the interpreter while the main thread waits for it."""


def start_imports(plan: Plan, log: Callable[[str], None]) -> threading.Thread | None:
    """Start the import that the plan needs; return its thread, or None. `log` prints lines for the user."""
    if plan.derived.attention_backend != "flash4":
        return None
    enable_kernel_cache(log)
    thread = threading.Thread(target=_import_flash4, name="importing flash-attn-4", daemon=True)
    thread.start()
    return thread


def enable_kernel_cache(log: Callable[[str], None]) -> None:
    """Enable the cache of flash-attn-4, unless the user has set it or the folder cannot be used."""
    cache = user_cache()
    folder = set_unless_given(f"{_CACHE}_DIR", str(cache / "megatrain" / "flash-attn-4") if cache else "")
    problem = _problem_with(folder, is_locked=True) if folder else "neither XDG_CACHE_HOME nor HOME is set"
    if problem is None:
        set_unless_given(f"{_CACHE}_ENABLED", "1")
    else:
        log(
            f"> flash-attn-4 compiles its kernels in every run: it cannot cache them in '{folder}': {problem}"
        )


def check_triton_cache(plan: Plan) -> None:
    """Check Triton's cache before the first kernel is compiled.

    Raises:
        ConfigError: this host cannot write to the folder.
    """
    folder = triton_cache()
    if plan.config.training.device != "cuda" or not plan.config.training.compile or folder is None:
        return
    problem = _problem_with(folder) if folder else "its name is empty"
    if problem is not None:
        raise ConfigError(
            f"Triton cannot cache compiled kernels in '{folder}' (TRITON_CACHE_DIR, or else .triton/cache in TRITON_HOME or HOME):"
            f" {problem}",
            fix="set TRITON_CACHE_DIR to a writable folder, such as one on each host's own disk",
        )


def _problem_with(folder: str, *, is_locked: bool = False) -> str | None:
    """Return why a folder cannot be used, or None. flash-attn-4 also locks files, which some network disks do not support."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=folder):
            if is_locked:
                with (Path(folder) / "probe.lock").open("a") as file:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return str(error)
    return None


def _import_flash4() -> None:
    default = sys.getswitchinterval()
    # Otherwise each operator of the main thread waits 5 ms and more.
    sys.setswitchinterval(_SWITCH_INTERVAL_SECONDS)
    with contextlib.suppress(Exception):  # the first use imports again and raises the error
        flash4()
    sys.setswitchinterval(default)
