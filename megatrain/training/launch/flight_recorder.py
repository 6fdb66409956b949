"""PyTorch's flight recorder of NCCL collectives: `--flight-recorder-dump-path`, as in Megatron-LM.

After a collective that times out, each rank writes the newest collectives with their states to a file, which
`python -m torch.distributed.flight_recorder.fr_trace` (`torchfrtrace`) analyses: it names the ranks that did not join.
"""

from __future__ import annotations

import os
from pathlib import Path

from megatrain.config import Config
from megatrain.config.environment import set_unless_given


def configure_flight_recorder(config: Config) -> None:
    """Set the variables that NCCL's process groups read when they are created; call it before. Variables of the user count."""
    resilience = config.resilience
    folder = resilience.flight_recorder_dump_path
    if folder is None:
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    prefix = os.path.join(folder, "nccl_trace_rank_")  # noqa: PTH118 (a prefix of files)
    size = str(resilience.flight_recorder_trace_buffer_size)
    switches = {
        "TORCH_NCCL_DUMP_ON_TIMEOUT": resilience.flight_recorder_dump_on_timeout,
        "TORCH_NCCL_EXTRA_DUMP_ON_EXEC": resilience.flight_recorder_extra_dump_on_exec,
        "TORCH_INCLUDE_STACK_TRACE": resilience.flight_recorder_include_stack_trace,
        "TORCH_INCLUDE_ONLY_ACTIVE": resilience.flight_recorder_include_only_active,
    }
    # torch 2.11 reads the first name of each pair; process groups of older versions the second.
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        set_unless_given(name, size)
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        set_unless_given(name, prefix)
    for name, is_on in switches.items():
        set_unless_given(name, str(int(is_on)))
