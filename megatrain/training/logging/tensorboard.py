"""TensorBoard's event files, without points that a resumed run writes twice.

A run is known by its `--save` folder, of which its files bear a mark. When it resumes, points behind the iteration that
it resumes from are cut out of its own files, and of no others: several runs may share a folder.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatrain.training.logging.scalars import VS_SAMPLES, has_twin


class TensorBoardCurves:
    """Appends points. The package tensorboard must be there.

    Args:
        folder: `--tensorboard-dir`.
        run: what tells this run from others in the folder, alike when it is resumed; None: it never is.
        queue_size: events that wait in memory.
        iteration, consumed_samples: where the run resumes.
    """

    def __init__(
        self, folder: Path, *, run: str | None, queue_size: int, iteration: int, consumed_samples: int
    ) -> None:
        logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it tells that TensorFlow is not installed
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 (optional package)

        suffix = ""
        if run is not None:
            suffix = f".megatrain-{hashlib.sha256(run.encode()).hexdigest()[:12]}"
            for path in sorted(folder.glob(f"events.out.tfevents.*{suffix}")):
                cut_events(path, iteration=iteration, consumed_samples=consumed_samples)
        self._writer = SummaryWriter(str(folder), max_queue=queue_size, filename_suffix=suffix)

    def write(self, scalars: Mapping[str, float], *, iteration: int, consumed_samples: int) -> None:
        """A point of each curve, and of its twin over samples."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, iteration)
            if has_twin(name):
                self._writer.add_scalar(f"{name}{VS_SAMPLES}", value, consumed_samples)

    def flush(self) -> None:
        """Have on the disk what was written."""
        self._writer.flush()

    def close(self) -> None:
        """Write what waits."""
        self._writer.close()


def cut_events(path: Path, *, iteration: int, consumed_samples: int) -> None:
    """Take the points behind this iteration, or these samples, out of a file; a torn end goes with them."""
    kept, is_changed = [], False
    content = path.read_bytes()
    for record, event in _records(content):
        points = event.summary.value
        is_late = any(
            event.step > (consumed_samples if value.tag.endswith(VS_SAMPLES) else iteration)
            for value in points
        )
        is_changed |= is_late
        if not is_late:
            kept.append(record)
    shortened = b"".join(kept)
    if is_changed or len(shortened) < len(content):
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_bytes(shortened)
        temporary.replace(path)


def _records(content: bytes) -> Iterator[tuple[bytes, Any]]:
    """Each whole record of an event file with its event: length (8 bytes), checksum (4), event, checksum (4)."""
    from tensorboard.compat.proto.event_pb2 import Event  # noqa: PLC0415 (optional package)

    start = 0
    while start + 12 <= len(content):
        stop = start + 12 + int.from_bytes(content[start : start + 8], "little") + 4
        if stop > len(content):
            return
        yield content[start:stop], Event.FromString(content[start + 12 : stop - 4])
        start = stop
