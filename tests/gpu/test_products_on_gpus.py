"""Products with chosen algorithms on a GPU: right, the same bits each time, cheap for the host, also in CUDA graphs and runs."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import pretrain
from megatrain.config.product_algorithms import MeasuredAlgorithm, Product, ProductAlgorithms
from megatrain.kernels.chosen_products import ChosenProducts, choose_algorithms, problem_of
from megatrain.kernels.cublaslt import algorithms_of, library_version, variants_of
from megatrain.kernels.linear import product
from megatrain.kernels.wgrad import accumulate_weight_gradient
from megatrain.tools import main

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("default"),  # Triton's own
]
ROOT = Path(__file__).resolve().parents[2]
RUN = (
    "--num-layers 2 --hidden-size 256 --num-attention-heads 4 --ffn-hidden-size 512 --normalization RMSNorm --swiglu"
    " --position-embedding-type rope --disable-bias-linear --hidden-dropout 0 --attention-dropout 0 --seq-length 256"
    " --mock-data --tokenizer-type NullTokenizer --vocab-size 2048 --micro-batch-size 2 --global-batch-size 8 --train-iters 6"
    " --eval-iters 0 --lr 1e-3 --bf16"
)
SIZES = [(256, 512, 128), (2048, 4096, 1024), (1000, 640, 4096), (136, 72, 200)]


@pytest.fixture(autouse=True)
def torch_chooses_afterwards() -> Iterator[None]:
    yield
    choose_algorithms((), torch.device("cuda", 0))


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to("cuda", torch.bfloat16)


def choose(one: Product, algorithm: bytes) -> None:
    entry = MeasuredAlgorithm(product=one, algorithm=algorithm.hex(), ms=1.0, torch_ms=1.0)
    choose_algorithms([entry], torch.device("cuda", 0))


def products_of(m: int, n: int, k: int) -> list[tuple[Product, Callable[[], torch.Tensor], torch.Tensor]]:
    """Return the products of a linear layer: each with a function that computes it, and its result in fp64."""
    x, w, dy = drawn(m, k), drawn(n, k, seed=1), drawn(m, n, seed=2)

    def weight_gradient() -> torch.Tensor:
        total = torch.ones(n, k, device="cuda")
        accumulate_weight_gradient(total, dy, x)
        return total

    return [
        (Product(m, n, k, False, True, False), lambda: product(x, w.t()), x.double() @ w.double().t()),
        (Product(m, k, n, False, False, False), lambda: product(dy, w), dy.double() @ w.double()),
        (Product(n, k, m, True, False, True), weight_gradient, 1 + dy.double().t() @ x.double()),
    ]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_each_algorithm_is_right_and_has_the_same_bits_each_time(size: tuple[int, int, int]) -> None:
    device = torch.device("cuda", 0)
    for one, compute, expected in products_of(*size):
        algorithms = algorithms_of(problem_of(one, device))
        variants = variants_of(problem_of(one, device), algorithms[0])
        print(f"{one}: {len(algorithms)} algorithms, {len(variants)} variants of the first")
        for algorithm in (*algorithms, *variants[:: max(1, len(variants) // 8)]):
            choose(one, algorithm)
            with torch.no_grad():
                found, again = compute(), compute()
            error = ((found - expected).abs().max() / expected.abs().max()).item()
            assert error < (2**-15 if one.accumulates else 2**-8), error
            assert torch.equal(found, again)


def test_a_call_costs_the_host_little_more_than_a_call_of_torch() -> None:
    one, compute, _ = products_of(256, 512, 128)[0]

    def microseconds() -> float:
        times = []
        with torch.no_grad():
            for _ in range(20):
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(200):
                    compute()
                times.append((time.perf_counter() - start) / 200 * 1e6)
        return min(times)

    of_torch = microseconds()
    choose(one, algorithms_of(problem_of(one, torch.device("cuda", 0)))[0])
    of_chosen = microseconds()
    print(f"torch {of_torch:.1f} us, with a chosen algorithm {of_chosen:.1f} us")
    assert of_chosen < of_torch + 5


def test_a_graph_repeats_the_product() -> None:
    one, compute, expected = products_of(256, 512, 128)[0]
    choose(one, algorithms_of(problem_of(one, torch.device("cuda", 0)))[-1])
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        compute()
        with torch.cuda.graph(graph):
            found = compute()
    found.zero_()
    graph.replay()
    assert ((found - expected).abs().max() / expected.abs().max()).item() < 2**-8


def losses(folder: Path, *flags: str) -> list[float]:
    folder.mkdir()
    command = [*RUN.split(), "--metrics-file", str(folder / "metrics.jsonl"), *flags]
    assert pretrain.main(command) == 0
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row["lm_loss"] for row in rows if "lm_loss" in row]


def test_a_tuned_run_trains_the_same_and_repeats_its_bits(tmp_path: Path) -> None:
    file = tmp_path / "algorithms.json"
    flags = [
        "tune",
        "--output",
        str(file),
        "--min-gain",
        "-1000",
        "--rounds",
        "3",
        "--variants",
        "8",
        *RUN.split(),
    ]
    assert main.main(flags) == 0
    content = ProductAlgorithms.from_json(file.read_text())
    assert (content.gpu, content.cublaslt) == (torch.cuda.get_device_name(), library_version())
    assert len(content.entries) == 15
    use = ("--product-algorithms", str(file))
    plain, tuned = losses(tmp_path / "plain"), losses(tmp_path / "tuned", *use)
    assert ChosenProducts.find is not None
    assert tuned == pytest.approx(plain, rel=2e-3)
    for second in ("--cuda-graph-impl none", "--cuda-graph-impl local"):
        command = [sys.executable, "scripts/check_determinism.py", f"--second={second}", "--"]
        command += [*RUN.split(), "--deterministic-mode", *use]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr


def test_a_file_of_another_gpu_or_library_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "algorithms.json"
    here = ProductAlgorithms(gpu=torch.cuda.get_device_name(), cublaslt=library_version(), entries=())
    for text in (
        here.to_json().replace(here.gpu, "NVIDIA A100"),
        here.to_json().replace(str(here.cublaslt), "1"),
    ):
        file.write_text(text)
        assert pretrain.main([*RUN.split(), "--product-algorithms", str(file)]) == 2
        assert "fix: measure again with `megatrain tune`" in capsys.readouterr().err
