"""A failed allocation ends in one message with what was asked for and held, exit code 1, and no traceback of an allocator."""

import errno
import resource
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from forked_job import ForkedJob
from run_helpers import command_line

from megatrain.config import Facts, Plan, parse, resolve
from megatrain.config.errors import ConfigError
from megatrain.process.available_memory import process_bytes
from megatrain.training.launch.out_of_memory import OutOfMemoryError, allocation_errors, is_out_of_memory
from megatrain.training.launch.ranks import report_errors
from megatrain.training.planning import memory_check  # noqa: F401 (imported before memory is limited)
from megatrain.training.trainer import Trainer  # noqa: F401 (likewise)


def limit_memory(_: int) -> None:
    """Leave 1 GiB of address space."""
    resource.setrlimit(resource.RLIMIT_AS, (1 << 40, resource.RLIM_INFINITY))
    held = (1 << 40) - process_bytes()
    resource.setrlimit(resource.RLIMIT_AS, (held + (1 << 30), resource.RLIM_INFINITY))


def test_a_step_that_does_not_fit_ends_in_one_message(tmp_path: Path) -> None:
    words = command_line(
        {
            "--seq-length": "512",
            "--micro-batch-size": "64",
            "--global-batch-size": "64",
            "--ffn-hidden-size": "8192",
        }
    )
    job = ForkedJob(words, 1, tmp_path, limit_memory)
    job.wait()
    errors = job.output(0)
    assert job.exit_codes == {0: 1}, errors
    assert "Traceback" not in errors
    assert errors.count("error: out of memory during iteration 1: ") == 1
    assert "GB asked for in host memory; held: " in errors
    assert "its limits (ulimit -v, ulimit -d) leave" in errors
    assert "the plan keeps" in errors
    assert "a smaller --micro-batch-size, --recompute-mlp-act, --recompute-activations" in errors


def plan_on(device: str) -> Plan:
    facts = Facts(vocab_size=128, eod_id=1, device=device)
    return resolve(parse(command_line({"--device": device})), facts)


CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.18 GiB."


def test_a_full_gpu_is_described() -> None:
    memory = {
        "current_device": 0,
        "mem_get_info": (10**9, 80 * 10**9),
        "memory_allocated": 70 * 10**9,
        "memory_reserved": 75 * 10**9,
    }
    with (
        mock.patch.multiple(
            torch.cuda, **{name: mock.Mock(return_value=value) for name, value in memory.items()}
        ),
        pytest.raises(OutOfMemoryError) as error,
        allocation_errors(plan_on("cuda"), lambda: "iteration 7", planned_bytes=6 * 10**10),
    ):
        raise torch.OutOfMemoryError(CUDA)
    assert error.value.problems[0].text == (
        "out of memory during iteration 7: 2.15 GB asked for on GPU 0; held: 70.00 GB allocated and 75.00 GB reserved by this process;"
        " 1.00 of 80.00 GB are free; the plan keeps 60.00 GB for the whole run"
    )
    assert error.value.exit_code == 1
    assert "--optimizer-cpu-offload" in error.value.problems[0].fix


def cpu_error() -> BaseException:
    with pytest.raises(RuntimeError) as error:
        torch.empty(1 << 60, dtype=torch.uint8)
    return error.value


def numpy_error() -> BaseException:
    with pytest.raises(MemoryError) as error:
        np.empty(1 << 60, dtype=np.uint8)
    return error.value


@pytest.mark.parametrize(
    ("error", "size"),
    [
        (cpu_error(), "1152921504.61 GB"),
        (numpy_error(), "1152921504.61 GB"),
        (MemoryError(), "an allocation"),
        (RuntimeError("std::bad_alloc"), "an allocation"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "an allocation"),
    ],
    ids=["torch", "numpy", "python", "c++", "system"],
)
def test_host_memory_that_cannot_be_allocated_is_described(
    error: BaseException, size: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also outside of a run, as in `megatrain generate`."""

    def fail() -> int:
        raise error

    assert report_errors(fail) == 1
    printed = capsys.readouterr().err
    assert printed.startswith(f"error: out of memory: {size} asked for in host memory; held: ")
    assert "fix: free memory on this host" in printed
    with (
        pytest.raises(OutOfMemoryError, match="during loading"),
        allocation_errors(plan_on("cpu"), lambda: "loading"),
    ):
        fail()


def test_other_errors_pass() -> None:
    for error in (
        RuntimeError("no memory of this"),
        OSError(errno.ENOSPC, "No space left"),
        ConfigError("a", fix="b"),
    ):
        assert not is_out_of_memory(error)
        with pytest.raises(type(error)) as found, allocation_errors(plan_on("cpu"), lambda: "iteration 1"):
            raise error
        assert found.value is error
