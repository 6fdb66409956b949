"""--flight-recorder-dump-path sets the variables that PyTorch's NCCL process groups read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatrain.config import parse
from megatrain.training.launch.flight_recorder import configure_flight_recorder

NAMES = (
    "TORCH_FR_",
    "TORCH_NCCL_TRACE",
    "TORCH_NCCL_DUMP",
    "TORCH_NCCL_EXTRA",
    "TORCH_NCCL_DEBUG",
    "TORCH_INCLUDE_",
)


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        os, "environ", {name: value for name, value in os.environ.items() if not name.startswith(NAMES)}
    )

    def of(flags: str) -> dict[str, str]:
        configure_flight_recorder(parse(flags.split()).config)
        return {name: value for name, value in os.environ.items() if name.startswith(NAMES)}

    return of


def test_nothing_is_recorded_without_a_folder(variables) -> None:
    assert variables("--flight-recorder-trace-buffer-size 10") == {}


def test_a_folder_gets_the_dumps_of_all_ranks(variables, tmp_path: Path) -> None:
    os.environ["TORCH_INCLUDE_STACK_TRACE"] = "1"  # the user's
    found = variables(
        f"--flight-recorder-dump-path {tmp_path}/dumps --no-flight-recorder-include-only-active"
    )
    assert (tmp_path / "dumps").is_dir()
    prefix = f"{tmp_path}/dumps/nccl_trace_rank_"
    assert found == {
        "TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": prefix, "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": prefix,
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_NCCL_EXTRA_DUMP_ON_EXEC": "1",
        "TORCH_INCLUDE_STACK_TRACE": "1", "TORCH_INCLUDE_ONLY_ACTIVE": "0",
    }  # fmt: skip
