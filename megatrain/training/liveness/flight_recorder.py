"""The last collectives of a rank, as PyTorch's flight recorder knows them: NCCL's or gloo's, finished or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

FOLDER = "flight_recorder"
_MAX_ENTRIES = 100


def write_collectives(folder: Path, rank: int) -> None:
    """Write the last collectives of this rank to `folder`/rank-N.json."""
    bindings: Any = torch._C._distributed_c10d  # noqa: SLF001 (no public access)
    of_nccl = getattr(bindings, "_dump_nccl_trace_json", None)  # builds without CUDA have none
    uses_nccl = dist.is_initialized() and dist.get_backend() == "nccl"
    dump = of_nccl if uses_nccl and of_nccl is not None else bindings._dump_fr_trace_json  # noqa: SLF001
    trace = json.loads(dump())
    trace["entries"] = trace.get("entries", [])[-_MAX_ENTRIES:]
    folder.mkdir(exist_ok=True)
    (folder / f"rank-{rank}.json").write_text(json.dumps(trace), encoding="utf-8")
