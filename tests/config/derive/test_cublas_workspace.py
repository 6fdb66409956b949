"""GEMMs have no workspace where they were measured to be as fast without one; elsewhere the plan has the reason."""

import os

import pytest

from megatrain.config import Facts
from megatrain.config.environment import read_environment, set_cublas_workspace

LARGE = (
    "--bf16 --hidden-dropout 0 --attention-dropout 0 --num-attention-heads 8 --hidden-size 2048 --seq-length 4096"
    " --max-position-embeddings 4096 --micro-batch-size 1 --make-vocab-size-divisible-by 1024"
)
TWO = "--tensor-model-parallel-size 2 --sequence-parallel"


@pytest.mark.parametrize(
    ("flags", "facts", "value", "reason"),
    [
        ("", {}, ":0:0", "start earlier"),
        (f"{TWO} --tp-comm-overlap", {"world_size": 2}, ":0:0", "start earlier"),
        ("--group-query-attention --num-query-groups 2", {}, ":0:0", "start earlier"),
        ("", {"device_capability": (8, 0)}, None, "on Hopper"),
        (f"{TWO} --no-tp-comm-overlap", {"world_size": 2}, None, "concurrently with collectives"),
        ("", {"world_size": 2}, None, "concurrently with collectives"),
        ("", {"device": "cpu", "device_capability": None}, None, "a CPU has none"),
        ("", {"cublas_workspace": ":16:8"}, ":16:8", "CUBLAS_WORKSPACE_CONFIG"),
        ("--deterministic-mode", {}, ":4096:8", "--deterministic-mode"),
        ("--fp8-format hybrid --fp8-recipe tensorwise", {}, None, "in 16 bits"),
        ("--transformer-impl transformer_engine", {}, None, "have their own"),
        ("--num-experts 4", {}, None, "routers"),
        ("--lora-rank 8", {}, None, "adapters"),
        ("--optimizer muon", {}, None, "of the optimizer"),
        ("--hidden-size 512 --ffn-hidden-size 4096", {}, None, "262,144 elements"),
        ("--make-vocab-size-divisible-by 128", {}, None, "262,144 elements"),
        ("--seq-length 1024", {}, None, "1,024 tokens"),
    ],
)
def test_large_gemms_have_no_workspace(plan_of, flags, facts, value, reason):
    libraries = {"transformer_engine": "2.20.2"}
    found = Facts(**{"device": "cuda", "device_capability": (9, 0), "libraries": libraries} | facts)
    plan = plan_of(f"{LARGE} {flags}", facts=found)
    assert plan.derived.cublas_workspace == value
    assert reason in plan.origins["derived.cublas_workspace"].detail


def test_what_this_process_has_set_is_no_choice_of_the_user(monkeypatch):
    """Ranks join again after a restart in the job, and in programs that train twice."""
    names = ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    found = []
    for value in (":0:0", ":4096:8", None):
        set_cublas_workspace(value)
        found.append([os.environ.get(name) for name in names])
        assert read_environment().cublas_workspace is None
    assert found == [[":0:0", "0"], [":4096:8", None], [None, None]]
    monkeypatch.setenv(names[0], ":16:8")
    set_cublas_workspace(":0:0")
    assert read_environment().cublas_workspace == os.environ[names[0]] == ":16:8"
    set_cublas_workspace(None)
