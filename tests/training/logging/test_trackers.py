"""MLflow and Comet: what they receive, resuming, and secrets; `test_curves.py` has what all trackers share."""

import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from metrics_files import logged_steps
from run_helpers import ROOT, command_line

import pretrain
from megatrain.config.environment import without_secrets

KEYS = {"COMET_API_KEY": "a-comet-secret", "MLFLOW_TRACKING_PASSWORD": "an-mlflow-secret"}


def flags_of(folder: Path, **changed: str | None) -> list[str]:
    flags: dict[str, str | None] = {
        "--mlflow-experiment": "tries", "--mlflow-run-name": "first", "--comet-project": "p", "--comet-workspace": "w",
        "--comet-experiment-name": "n", "--save": str(folder), "--load": str(folder), "--lr-decay-iters": "9",
        "--eval-iters": "1", "--train-iters": "2", **changed,
    }  # fmt: skip
    return command_line(flags)


class Recorded:
    """An object whose calls are recorded: name, and all arguments."""

    def __init__(self, name: str, calls: list[tuple[str, Any]], returned: dict[str, Any]) -> None:
        self._name, self._calls, self._returned = name, calls, returned

    def __getattr__(self, method: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            self._calls.append((f"{self._name}.{method}", (*arguments, options)))
            return self._returned.get(method)

        return call


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """The calls of stand-ins for both packages."""
    found: list[tuple[str, Any]] = []
    run = types.SimpleNamespace(info=types.SimpleNamespace(run_id="run1"))
    client = Recorded("mlflow", found, {"create_experiment": "7", "create_run": run})
    entities = types.SimpleNamespace(Metric=lambda *values: values, Param=lambda *values: values)
    mlflow = types.SimpleNamespace(MlflowClient=lambda: client, entities=entities)
    experiment = Recorded("comet", found, {"get_key": "key1"})

    def start(**options: Any) -> Recorded:
        found.append(("comet.start", options))
        return experiment

    comet = types.SimpleNamespace(start=start, ExperimentConfig=dict)
    for name, module in (("mlflow", mlflow), ("mlflow.entities", entities), ("comet_ml", comet)):
        monkeypatch.setitem(sys.modules, name, module)
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    versions = {"mlflow": "0.0", "comet_ml": "0.0"}
    monkeypatch.setattr("megatrain.training.launch.facts.library_versions", lambda: versions)
    return found


def of(calls: list[tuple[str, Any]], name: str) -> list[Any]:
    return [arguments for one, arguments in calls if one == name]


def test_both_get_the_curves_and_the_settings(tmp_path: Path, calls: list[tuple[str, Any]]) -> None:
    assert pretrain.main(flags_of(tmp_path)) == 0
    assert pretrain.main(flags_of(tmp_path, **{"--train-iters": "3"})) == 0

    assert of(calls, "mlflow.create_run") == [("7", {"run_name": "first"})], (
        "the second run continues the first"
    )
    assert of(calls, "mlflow.update_run") == [("run1", {"status": "RUNNING"})]
    batches = of(calls, "mlflow.log_batch")
    points = [point for *_, options in batches for point in options.get("metrics", ())]
    assert [step for name, _, _, step in points if name == "lm loss"] == [1, 2, 3]
    parameters = [one for *_, options in batches for one in options.get("params", ())]
    assert ("model.num_layers", "4") in parameters
    assert len(dict(parameters)) == len(parameters) > 100
    assert max(len(options.get("params", ())) for *_, options in batches) == 100, "as many as MLflow takes"
    assert of(calls, "mlflow.set_terminated") == [("run1", {})] * 2

    first, second = of(calls, "comet.start")
    assert (first["workspace"], first["project"], first["experiment_config"]["name"]) == ("w", "p", "n")
    assert [(one["mode"], one["experiment_key"]) for one in (first, second)] == [
        ("create", None),
        ("get", "key1"),
    ]
    assert not any(first["experiment_config"][f"log_{what}"] for what in ("code", "git_patch", "env_details"))
    logged = of(calls, "comet.log_metrics")
    assert [options["step"] for values, options in logged if "lm loss" in values] == [1, 2, 3]
    assert {"lm loss validation", "consumed samples"} <= {name for values, _ in logged for name in values}
    assert of(calls, "comet.log_parameters")[0][0]["model.num_layers"] == 4
    assert len(of(calls, "comet.end")) == 2

    written = str(calls) + "".join(path.read_text() for path in tmp_path.glob("*.*") if path.is_file())
    assert not [secret for secret in KEYS.values() if secret in written]


def test_one_that_fails_stops_neither_the_run_nor_the_other(
    tmp_path: Path,
    calls: list[tuple[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def start(**_: Any) -> None:
        raise ValueError(f"the key {os.environ['COMET_API_KEY']} of https://me:word@host is not valid")

    monkeypatch.setattr(sys.modules["comet_ml"], "start", start)
    assert pretrain.main(flags_of(tmp_path)) == 0
    out = capsys.readouterr().out
    words = "Comet is disabled for the rest of the run: ValueError: the key <COMET_API_KEY> of https://host is not valid"
    assert out.count(words) == out.count("is disabled") == 1
    assert of(calls, "mlflow.set_terminated") == [("run1", {})]


def test_errors_have_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "123456789")
    monkeypatch.setenv("SHORT_KEY", "on")
    assert without_secrets("on 123456789 at http://a:b@c/d") == "on <MY_TOKEN> at http://c/d"


def test_mlflow_has_the_values_of_the_metrics_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real package, in files. A run that stops and resumes has one run there."""
    pytest.importorskip("mlflow")
    flags = dict.fromkeys(("--comet-project", "--comet-workspace", "--comet-experiment-name"))
    store = f"file://{tmp_path / 'store'}"
    environment = os.environ | KEYS | {"MLFLOW_TRACKING_URI": store, "MLFLOW_ALLOW_FILE_STORE": "true"}
    for train_iters in ("2", "4"):
        command = [
            sys.executable,
            "pretrain.py",
            *flags_of(tmp_path / "run", **flags, **{"--train-iters": train_iters}),
        ]
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
    losses = [(line["iteration"], line["lm_loss"]) for line in logged_steps(tmp_path / "run")]
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    import mlflow

    client = mlflow.MlflowClient(store)
    (run,) = client.search_runs([client.get_experiment_by_name("tries").experiment_id])
    assert (run.info.status, run.info.run_name) == ("FINISHED", "first")
    assert [
        (point.step, point.value) for point in client.get_metric_history(run.info.run_id, "lm loss")
    ] == losses
    assert run.data.params["model.num_layers"] == "4"
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert not [name for name, secret in KEYS.items() if secret.encode() in written]
