"""Curves in W&B, MLflow and Comet: one interface, and a thread that calls it.

    write ─> waiting points ─> thread: Tracker.start, log, log ..., finish

Training never waits for a tracker, and its end only a limited time: neither an error nor a call that does not return stops training.
The first prints a warning, and disables that tracker. A run that resumes with the same `--save` folder continues its run of the tracker,
whose id is in a file there. megatrain passes no credentials: trackers read their own environment variables (WANDB_API_KEY,
MLFLOW_TRACKING_TOKEN, COMET_API_KEY ...).
"""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol

from megatrain.config import LoggingConfig
from megatrain.config.environment import without_secrets
from megatrain.storage.files import read_regular, replace_file

_MAX_WAITING_POINTS = 10_000
"""Points that wait for a tracker; with more it counts as hanging."""
_THREAD: Final = "tracker"
_MLFLOW_MAX_CHARACTERS, _MLFLOW_MAX_PARAMETERS = 500, 100
"""Most characters of a parameter, and most parameters of a request."""


class Tracker(Protocol):
    """A program that shows the curves of runs. All calls come from one thread, and may fail or not return."""

    name: ClassVar[str]
    id_file: ClassVar[str]

    def start(self, run_id: str | None) -> str:
        """Start a run, or continue that with this id; return its id."""

    def log(self, scalars: Mapping[str, float], iteration: int) -> None:
        """Add a point to each curve."""

    def finish(self) -> None:
        """Send what is left, and end the run."""


class Wandb:
    """W&B. It keeps the first of two points with the same iteration. `folder`: place of its files. Implements `Tracker`."""

    name: ClassVar[str] = "W&B"
    id_file: ClassVar[str] = "wandb_run_id.txt"

    def __init__(self, config: LoggingConfig, folder: Path, settings: Mapping[str, Any]) -> None:
        self._config, self._folder, self._settings = config, folder, settings
        self._run: Any = None

    def start(self, run_id: str | None) -> str:
        import wandb  # noqa: PLC0415 (optional package)

        config = self._config
        folder = Path(config.wandb_save_dir or self._folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=config.wandb_project,
            name=config.wandb_exp_name,
            entity=config.wandb_entity,
            dir=str(folder),
            config=dict(self._settings),
            id=run_id,
            resume="allow",
        )
        return str(self._run.id)

    def log(self, scalars: Mapping[str, float], iteration: int) -> None:
        self._run.log(scalars, step=iteration)

    def finish(self) -> None:
        self._run.finish()


class Mlflow:
    """MLflow. Its names have no other characters than letters, digits and `_-. /`. Implements `Tracker`."""

    name: ClassVar[str] = "MLflow"
    id_file: ClassVar[str] = "mlflow_run_id.txt"

    def __init__(self, config: LoggingConfig, settings: Mapping[str, Any]) -> None:
        self._config, self._settings = config, settings
        self._client: Any = None
        self._run_id = ""

    def start(self, run_id: str | None) -> str:
        """See `Tracker`. Settings are those of the first start: a parameter of MLflow cannot change."""
        from mlflow import MlflowClient  # noqa: PLC0415 (optional package)
        from mlflow.entities import Param  # noqa: PLC0415 (optional package)

        self._client, name = MlflowClient(), self._config.mlflow_experiment
        if run_id is not None:
            self._client.update_run(run_id, status="RUNNING")
            self._run_id = run_id
            return run_id
        found = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if found is None else found.experiment_id
        run = self._client.create_run(experiment, run_name=self._config.mlflow_run_name)
        self._run_id = run.info.run_id
        parameters = [
            Param(path, str(value)[:_MLFLOW_MAX_CHARACTERS]) for path, value in _by_path(self._settings)
        ]
        for first in range(0, len(parameters), _MLFLOW_MAX_PARAMETERS):
            some = parameters[first : first + _MLFLOW_MAX_PARAMETERS]
            self._client.log_batch(self._run_id, params=some)
        return self._run_id

    def log(self, scalars: Mapping[str, float], iteration: int) -> None:
        from mlflow.entities import Metric  # noqa: PLC0415 (optional package)

        now = round(1000 * time.time())
        points = [
            Metric(re.sub(r"[^\w\-. /]", "_", name), value, now, iteration) for name, value in scalars.items()
        ]
        self._client.log_batch(self._run_id, metrics=points)

    def finish(self) -> None:
        self._client.set_terminated(self._run_id)


class Comet:
    """Comet. It gets curves and settings only: it would record source code, output and the command line too. Implements `Tracker`."""

    name: ClassVar[str] = "Comet"
    id_file: ClassVar[str] = "comet_experiment_key.txt"

    def __init__(self, config: LoggingConfig, settings: Mapping[str, Any]) -> None:
        self._config, self._settings = config, settings
        self._experiment: Any = None

    def start(self, run_id: str | None) -> str:
        import comet_ml  # noqa: PLC0415 (optional package)

        recorded = dict.fromkeys(
            (
                "log_code", "log_graph", "log_git_metadata", "log_git_patch", "log_env_details",
                "parse_args", "auto_metric_logging", "auto_param_logging",
            ),
            False,
        )  # fmt: skip
        self._experiment = comet_ml.start(
            workspace=self._config.comet_workspace,
            project=self._config.comet_project,
            experiment_key=run_id,
            mode="get" if run_id else "create",
            experiment_config=comet_ml.ExperimentConfig(
                name=self._config.comet_experiment_name, auto_output_logging=False, **recorded
            ),
        )
        self._experiment.log_parameters(dict(_by_path(self._settings)))
        return str(self._experiment.get_key())

    def log(self, scalars: Mapping[str, float], iteration: int) -> None:
        self._experiment.log_metrics(dict(scalars), step=iteration)

    def finish(self) -> None:
        self._experiment.end()


def _by_path(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield path and value of each setting."""
    for section, values in settings.items():
        for name, value in values.items():
            yield f"{section}.{name}", value


def trackers_of(config: LoggingConfig, save: Path | None, settings: Mapping[str, Any]) -> Iterator[Tracker]:
    """Yield the trackers that the flags name. `settings`: the run's configuration, by section."""
    if config.wandb_project is not None:
        yield Wandb(config, save / "wandb" if save else Path(), settings)
    if config.mlflow_experiment is not None:
        yield Mlflow(config, settings)
    if config.comet_project is not None:
        yield Comet(config, settings)


class TrackerCurves:
    """Curves of one run of a tracker. Implements `CurveWriter`.

    Args:
        save_folder: the `--save` folder, if there is one.
        warn: prints a warning; called by the thread that calls the methods.
        seconds_to_finish: limit of `close`.
    """

    def __init__(
        self,
        tracker: Tracker,
        *,
        save_folder: Path | None,
        warn: Callable[[str], None],
        seconds_to_finish: float = 60.0,
    ) -> None:
        self._tracker, self._save_folder = tracker, save_folder
        self._warn, self._seconds_to_finish = warn, seconds_to_finish
        self._points: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(_MAX_WAITING_POINTS)
        self._problem: str | None = None
        self._is_on = True
        self._thread = threading.Thread(target=self._send, name=_THREAD, daemon=True)
        self._thread.start()

    def write(self, scalars: Mapping[str, float], *, iteration: int, consumed_samples: int) -> None:
        """Add a point to each curve."""
        if self._points.full():
            self._problem = self._problem or f"{_MAX_WAITING_POINTS} points wait for it"
        self._disable_after_a_problem()
        if self._is_on:
            # Trackers plot any curve over any other, so `consumed samples` replaces Megatron-LM's `... vs samples` curves.
            self._points.put_nowait((iteration, {**scalars, "consumed samples": consumed_samples}))

    def flush(self) -> None:
        """Do nothing: points are sent as they come."""

    def close(self) -> None:
        """Send buffered points and finish the run of the tracker."""
        if self._is_on and not self._points.full():
            self._points.put_nowait(None)
            self._thread.join(self._seconds_to_finish)
        if self._thread.is_alive():
            self._problem = self._problem or f"it did not finish within {self._seconds_to_finish:g} s"
        self._disable_after_a_problem()

    def _send(self) -> None:
        """Start the run, send points and finish it: main function of the thread. An exception is a problem of the tracker alone."""
        try:
            self._start()
            for iteration, scalars in iter(self._points.get, None):
                self._tracker.log(scalars, iteration)
            self._tracker.finish()
        except (Exception, SystemExit) as error:  # noqa: BLE001 (an error of a tracker or the network must not stop training)
            self._problem = f"{type(error).__name__}: {error}"

    def _start(self) -> None:
        """Start or continue the run, and store its id."""
        file = None if self._save_folder is None else self._save_folder / self._tracker.id_file
        known = read_regular(file, max_bytes=1000).decode().strip() if file and file.exists() else None
        run_id = self._tracker.start(known or None)
        if file is not None:
            replace_file(file, [f"{run_id}\n".encode()])

    def _disable_after_a_problem(self) -> None:
        """Print a warning and send nothing more, once there is a problem."""
        if self._is_on and self._problem is not None:
            self._is_on = False
            self._warn(
                f"> warning: {self._tracker.name} is disabled for the rest of the run: {without_secrets(self._problem)}"
            )


def is_tracker_hanging() -> bool:
    """Return whether a call of a tracker has not returned, after the run: its exit handler would not return either."""
    return any(thread.name == _THREAD for thread in threading.enumerate())
