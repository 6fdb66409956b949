"""Start with --product-algorithms: files that cannot be read, another GPU, another library, and one that fits."""

import dataclasses
from pathlib import Path

import pytest
import torch

from megatrain.config import Facts, Plan, parse, resolve
from megatrain.config.environment import read_environment
from megatrain.config.errors import ConfigError
from megatrain.config.product_algorithms import MeasuredAlgorithm, Product, ProductAlgorithms
from megatrain.kernels.chosen_products import UnusableAlgorithmError
from megatrain.training.launch import product_algorithms
from megatrain.training.launch.product_algorithms import read_product_algorithms, use_product_algorithms

RUN = (
    "--num-layers 1 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --lr 1e-3 --micro-batch-size 1 --train-iters 1"
    " --mock-data --vocab-size 64 --position-embedding-type rope --bf16 --product-algorithms"
)
ENTRY = MeasuredAlgorithm(
    product=Product(64, 64, 64, False, True, False), algorithm="01" * 64, ms=1.0, torch_ms=2.0
)
FILE = ProductAlgorithms(gpu="NVIDIA H200", cublaslt=130100, entries=(ENTRY,))


def plan() -> Plan:
    facts = Facts(device="cuda", product_algorithms=FILE.to_json())
    return resolve(parse([*RUN.split(), "a.json"]), facts)


@pytest.mark.parametrize("content", [None, b"\xff", b"{}", b'{"gpu": 1}'])
def test_a_file_that_cannot_be_read_is_a_problem(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "a.json"
    if content is not None:
        file.write_bytes(content)
    text, (problem,) = read_product_algorithms(parse([*RUN.split(), str(file)]))
    assert text is None
    assert problem.text.startswith(f"--product-algorithms {file} cannot be read: ")
    assert "megatrain tune" in problem.fix
    with pytest.raises(ConfigError, match="cannot be read"):
        resolve(parse([*RUN.split(), str(file)]), Facts(device="cuda", data_problems=(problem,)))


def test_a_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(FILE.to_json())
    assert read_product_algorithms(parse([*RUN.split(), str(file)])) == (FILE.to_json(), [])


@pytest.mark.parametrize(("gpu", "version"), [("NVIDIA H100", 130100), ("NVIDIA H200", 130200)])
def test_another_gpu_or_library_is_refused(monkeypatch: pytest.MonkeyPatch, gpu: str, version: int) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: gpu)
    monkeypatch.setattr(product_algorithms, "library_version", lambda: version)
    problem = rf"--product-algorithms a.json .*NVIDIA H200 with cuBLASLt 130100, .*{gpu} with {version}\n  fix: .*tune"
    with pytest.raises(ConfigError, match=problem):
        use_product_algorithms(plan(), read_environment())


def test_a_fitting_file_is_used_and_a_refused_algorithm_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = []
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(product_algorithms, "library_version", lambda: 130100)
    monkeypatch.setattr(product_algorithms, "choose_algorithms", lambda *arguments: chosen.append(arguments))
    use_product_algorithms(plan(), read_environment())
    assert chosen == [((ENTRY,), torch.device("cuda", 0))]
    without = resolve(parse(RUN.split()[:-1]), Facts(device="cuda"))
    use_product_algorithms(without, read_environment())
    assert chosen[1][0] == ()

    def refuse(*_: object) -> None:
        raise UnusableAlgorithmError("cuBLASLt refuses an algorithm")

    monkeypatch.setattr(product_algorithms, "choose_algorithms", refuse)
    with pytest.raises(ConfigError, match=r"a.json: cuBLASLt refuses[\s\S]*fix: .*tune"):
        use_product_algorithms(plan(), read_environment())


def test_ranks_of_one_visible_gpu_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    environment = dataclasses.replace(read_environment(), local_rank=3, binds_gpus=True)
    assert product_algorithms.local_gpu(environment).index == 0
    assert product_algorithms.local_gpu(dataclasses.replace(environment, binds_gpus=False)).index == 3
