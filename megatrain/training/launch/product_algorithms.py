"""Start of a run with --product-algorithms: rank 0 reads the file, and each rank checks that it fits its GPU and library.

All ranks have the contents from rank 0, so that the same product has the same algorithm, and the same bits, on all of them.
"""

from __future__ import annotations

from pathlib import Path

import torch

from megatrain.config import Plan, Request
from megatrain.config.environment import LaunchEnvironment
from megatrain.config.errors import ConfigError, Problem
from megatrain.config.product_algorithms import MEASURE_AGAIN, ProductAlgorithms
from megatrain.kernels.chosen_products import UnusableAlgorithmError, choose_algorithms
from megatrain.kernels.cublaslt import library_version


def read_product_algorithms(request: Request) -> tuple[str | None, list[Problem]]:
    """Return the contents of the file, None without one, and its problems."""
    path = request.known("training.product_algorithms")
    if path is None:
        return None, []
    try:
        text = Path(path).read_text(encoding="utf-8")
        ProductAlgorithms.from_json(text)
    except (OSError, ValueError) as error:
        return None, [Problem(f"--product-algorithms {path} cannot be read: {error}", MEASURE_AGAIN)]
    return text, []


def use_product_algorithms(plan: Plan, environment: LaunchEnvironment) -> None:
    """Let products of this process use the algorithms of the plan from now on, or torch's choice without a file.

    Raises:
        ConfigError: they are of another GPU or version of the library, or the library refuses one.
    """
    found, flag = (
        plan.derived.product_algorithms,
        f"--product-algorithms {plan.config.training.product_algorithms}",
    )
    if found is None or plan.config.training.device != "cuda":
        choose_algorithms((), torch.device("cpu"))
        return
    device = local_gpu(environment)
    here = torch.cuda.get_device_name(device), library_version()
    if here != (found.gpu, found.cublaslt):
        raise ConfigError(
            f"{flag} was measured on {found.gpu} with cuBLASLt {found.cublaslt}, and this is {here[0]} with {here[1]}",
            fix=MEASURE_AGAIN,
        )
    try:
        choose_algorithms(found.entries, device)
    except UnusableAlgorithmError as error:
        raise ConfigError(f"{flag}: {error}", fix=MEASURE_AGAIN) from error


def local_gpu(environment: LaunchEnvironment) -> torch.device:
    """Return the GPU of this rank."""
    sees_one_gpu = environment.binds_gpus and torch.cuda.device_count() == 1
    return torch.device("cuda", 0 if sees_one_gpu else environment.local_rank)
