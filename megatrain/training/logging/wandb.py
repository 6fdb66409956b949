"""W&B: the same curves as in TensorBoard. It never stops a run: what fails is told once, and W&B is left alone then.

Of the environment it reads what it always reads (WANDB_API_KEY, WANDB_MODE, ...); nothing of that passes through here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatrain.config import LoggingConfig

_RUN_ID_FILE = "wandb_run_id.txt"


class WandbCurves:
    """One run at W&B. A run that resumes in the same `--save` folder goes on there.

    Args:
        config: its `wandb_project` is given.
        save_folder: of the run, if it has one.
        settings: what W&B shows as the run's configuration.
        say: tells the user.
    """

    def __init__(
        self,
        config: LoggingConfig,
        *,
        save_folder: Path | None,
        settings: Mapping[str, Any],
        say: Callable[[str], None],
    ) -> None:
        self._say = say
        self._run: Any = None
        with self._told():
            import wandb  # noqa: PLC0415 (optional package)

            folder = Path(config.wandb_save_dir or (save_folder / "wandb" if save_folder else "."))
            folder.mkdir(parents=True, exist_ok=True)
            id_file = save_folder / _RUN_ID_FILE if save_folder else None
            run_id = id_file.read_text(encoding="utf-8").strip() if id_file and id_file.exists() else None
            self._run = wandb.init(
                project=config.wandb_project,
                name=config.wandb_exp_name,
                entity=config.wandb_entity,
                dir=str(folder),
                config=dict(settings),
                id=run_id,
                resume="allow",
            )
            if id_file is not None:
                id_file.write_text(f"{self._run.id}\n", encoding="utf-8")

    def write(self, scalars: Mapping[str, float], *, iteration: int, consumed_samples: int) -> None:
        """A point of each curve. W&B keeps the first of two points of one iteration."""
        if self._run is None:
            return
        with self._told():
            # W&B draws any curve over any other: one of the samples stands for Megatron-LM's `... vs samples`.
            self._run.log({**scalars, "consumed samples": consumed_samples}, step=iteration)

    def flush(self) -> None:
        """W&B writes in a process of its own."""

    def close(self) -> None:
        """Send what waits."""
        if self._run is not None:
            with self._told():
                self._run.finish()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Whatever goes wrong inside is told, and nothing is sent from then on."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 (a library's trouble with a network is not the run's)
            self._run = None
            self._say(f"> warning: W&B gets nothing from here on: {type(error).__name__}: {error}")
