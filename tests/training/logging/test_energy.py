"""The energy of GPUs, with a stand-in for NVML."""

import sys
from types import SimpleNamespace

import pytest
import torch

from megatrain.config.errors import InputError
from megatrain.training.logging.energy import EnergyMeter, energy_line


class NVMLError(Exception):
    """An error of the stand-in."""


def stand_in(monkeypatch: pytest.MonkeyPatch, counter: list[int] | None) -> None:
    """Replace NVML by a GPU whose counter has these values, in mJ; None: it has no counter."""

    def read(handle: str) -> int:
        if counter is None:
            raise NVMLError("Not Supported")
        assert handle == "GPU-12ab"
        return counter.pop(0)

    library = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetTotalEnergyConsumption=read,
        NVMLError=NVMLError,
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="12ab"))


def test_energy_is_that_since_the_last_call(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, [5000, 12500, 13000])
    meter = EnergyMeter(torch.device("cuda", 0))
    assert [meter.take(), meter.take()] == [7.5, 0.5]


def test_a_gpu_without_a_counter_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, None)
    with pytest.raises(InputError, match=r"--log-energy: the energy of cuda:0 cannot be read: Not Supported"):
        EnergyMeter(torch.device("cuda", 0))


def test_the_line_has_means_and_the_total() -> None:
    line = energy_line([600.0, 800.0], seconds=2.0, num_iterations=10)
    assert line == (
        " energy per GPU (J/iter/GPU): 70.00 | power per GPU (W/GPU): 350.00 | total (J/iter): 140.0 |"
    )
