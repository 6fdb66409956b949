"""What takes long before the first iteration and needs no one to wait for it: flash-attn-4, on GPUs where attention runs on it.

    plan ─> its kernels, once compiled, are kept ─> it is imported in a thread, while groups are joined and weights drawn

The library keeps compiled kernels where FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED is 1, in ..._CACHE_DIR (its cache_utils.py);
Triton always does, in TRITON_CACHE_DIR or ~/.triton/cache, and cannot do without. What goes wrong in the thread comes again
where the library is first used.
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
_TURN = 1e-4
"""Seconds that the import computes while the main thread wants to."""


def begin_imports(plan: Plan, say: Callable[[str], None]) -> threading.Thread | None:
    """Begin what the plan will need; the thread that does it, if there is one. `say`: to the user."""
    if plan.derived.attention_backend != "flash4":
        return None
    keep_compiled_kernels(say)
    thread = threading.Thread(target=_import_flash4, name="importing flash-attn-4", daemon=True)
    thread.start()
    return thread


def keep_compiled_kernels(say: Callable[[str], None]) -> None:
    """Have flash-attn-4 keep what it compiles, unless the user has said otherwise or the folder does not serve."""
    cache = user_cache()
    folder = set_unless_given(f"{_CACHE}_DIR", str(cache / "megatrain" / "flash-attn-4") if cache else "")
    problem = _problem_with(folder, is_locked=True) if folder else "neither XDG_CACHE_HOME nor HOME is set"
    if problem is None:
        set_unless_given(f"{_CACHE}_ENABLED", "1")
    else:
        say(
            f"> flash-attn-4 compiles its kernels in every run, as they cannot be kept in '{folder}': {problem}"
        )


def require_triton_cache(plan: Plan) -> None:
    """Before Triton compiles its first kernel in the middle of the start, and finds no place for it.

    Raises:
        ConfigError: this host's folder does not serve.
    """
    folder = triton_cache()
    if plan.derived.device != "cuda" or not plan.config.training.compile or folder is None:
        return
    problem = _problem_with(folder) if folder else "its name is empty"
    if problem is not None:
        raise ConfigError(
            f"Triton cannot keep compiled kernels in '{folder}' (TRITON_CACHE_DIR, or else .triton/cache in TRITON_HOME or HOME):"
            f" {problem}",
            fix="set TRITON_CACHE_DIR to a folder that can be written, such as one on each host's own disk",
        )


def _problem_with(folder: str, *, is_locked: bool = False) -> str | None:
    """Why nothing can be kept there. flash-attn-4 locks files, and would end the run where it cannot, as on some network disks."""
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
    usual = sys.getswitchinterval()
    sys.setswitchinterval(_TURN)  # or each of the main thread's operators waits for this one, 5 ms and more
    with contextlib.suppress(Exception):  # see above: the import is made again there, and its error is told
        flash4()
    sys.setswitchinterval(usual)
