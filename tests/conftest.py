"""Golden files: recorded from Megatron-LM; those with text are not part of the project.

pytest                                     uses tests/golden; tests that need text or its token ids are skipped
pytest --golden=/path/to/golden/data       uses the whole recording, and runs all of them
pytest --families=/path/to/families        uses recordings of BERT, T5 and other families, ../shared/golden/families by default
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from free_ports import free_port
from hypothesis import HealthCheck, settings

GOLDEN = Path(__file__).with_name("golden")
GROUPS = {
    "tests/distributed/model/": "layers over ranks",
    "tests/distributed/parallel/": "layers over ranks",
    "tests/distributed/stops/": "stops of ranks",
    "tests/distributed/debugging/": "debugging over ranks",
    "tests/distributed/": "distributed",
    "tests/test_docs_commands.py": "docs",
}
"""Groups of tests that share slow set-up, such as a pool of ranks, by the beginning of their names."""
LAUNCHERS = (
    "SLURM_",
    "OMPI_",
    "PMI_",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "MASTER_",
    "TORCHELASTIC_",
    "MEGATRAIN_SECRET",
)
"""Beginnings of the variables that start a run on several ranks."""

settings.register_profile("of any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("of any speed")  # an example may take long on a busy machine
gc.disable()  # until `pytest_collection_finish`: nothing that is imported or collected is garbage
for variable in [name for name in os.environ if name.startswith(LAUNCHERS)]:
    del os.environ[variable]  # as in a job of Slurm: tests and the processes that they start set their own


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n`, run the tests of a group or of a file in one process, in sequence: what a module computes once is
    computed in one process only. The group marks of xdist 3.8 would do the same, but pytest 9.2 ignores them silently."""
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False  # files with many tests are not the slow ones

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next(
                (group for start, group in GROUPS.items() if nodeid.startswith(start)),
                super()._split_scope(nodeid),
            )

    return ByGroup(config, log)


class PromptFailures:
    """Prints the name and the error of a failed test when it fails; the report of all follows at the end."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            crash = getattr(report.longrepr, "reprcrash", None)
            error = str(crash.message if crash is not None else report.longrepr).strip().splitlines()
            terminal.write_line(f"\nFAILED {report.nodeid} ({report.when}): {error[0] if error else ''}")


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(PromptFailures(config))


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], None]:
    """A check that fails if a second process of this test run repeats the same set-up."""

    def check(name: str) -> None:
        if "PYTEST_XDIST_WORKER" in os.environ:
            (tmp_path_factory.getbasetemp().parent / f"{name} is made").touch(exist_ok=False)

    return check


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--golden", type=Path, metavar="DIR", help="the whole golden recording, with its text")
    parser.addoption("--families", type=Path, metavar="DIR", help="recorded runs of BERT, T5 ...")
    parser.addoption("--nightly", action="store_true", help="also run the tests marked `nightly`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests marked `nightly`, unless --nightly is given: scripts/nightly.sh runs them."""
    if config.getoption("--nightly"):
        return
    nightly = [item for item in items if item.get_closest_marker("nightly")]
    config.hook.pytest_deselected(items=nightly)
    items[:] = [item for item in items if not item.get_closest_marker("nightly")]


def pytest_collection_finish() -> None:
    """Leave all that was imported and collected out of later collections of garbage: they would search it, and in a
    forked process copy the pages that it lies on."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def small_mock_data() -> Iterator[None]:
    """Mock data has 1,000 sequences in this process and those that it forks: an index of all 100,000 takes a second in each rank."""
    with patch("megatrain.data.samples.mock.NUM_SEQUENCES", 1000):
        yield


@pytest.fixture(scope="session", autouse=True)
def port_of_torchrun() -> Iterator[None]:
    """torchrun's default port is one for all test processes; each uses its own."""
    with patch.dict(os.environ, {"PET_MASTER_PORT": str(free_port())}):
        yield


@pytest.fixture(scope="module")
def whole_mock_data(small_mock_data: None) -> Iterator[None]:
    """Mock data has as many sequences as Megatron-LM's, in this process."""
    with patch("megatrain.data.samples.mock.NUM_SEQUENCES", 100_000):
        yield


@pytest.fixture(scope="session")
def golden(pytestconfig: pytest.Config) -> Path:
    """The folder of golden files; only numbers and index files are sure to be there."""
    given: Path | None = pytestconfig.getoption("golden")
    return (given or GOLDEN).resolve()


@pytest.fixture(scope="session")
def golden_text(pytestconfig: pytest.Config) -> Path:
    """The folder of golden files with text and token ids; skips the test where it was not given."""
    given: Path | None = pytestconfig.getoption("golden")
    if given is None:
        pytest.skip("needs text: run with --golden DIR")
    return given.resolve()


@pytest.fixture(scope="session")
def families(pytestconfig: pytest.Config) -> Path:
    """The folder of recordings of BERT, T5 and other families; skips the test where there is none."""
    folder: Path = pytestconfig.getoption("families") or Path(__file__).parents[2] / "shared/golden/families"
    if not folder.is_dir():
        pytest.skip("needs recordings: run with --families DIR")
    return folder.resolve()


@pytest.fixture(scope="session")
def expected(golden: Path) -> dict[str, Any]:
    """The values that Megatron-LM's data classes returned."""
    content: dict[str, Any] = json.loads((golden / "expected.json").read_text())
    return content
