"""The environment variables of each launcher."""

import pytest

from megatrain.config.environment import first_host, read_environment

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node1",
    "MASTER_PORT": "41000", "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
SRUN = {
    "SLURM_JOB_ID": "123456", "SLURM_STEP_ID": "0", "SLURM_PROCID": "9", "SLURM_NTASKS": "12", "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "8,4", "SLURM_STEP_NODELIST": "gpu[007,012]",
    "SLURM_JOB_NODELIST": "gpu[001-012]",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}  # fmt: skip
MPICH = {
    "PMI_RANK": "2",
    "PMI_SIZE": "4",
    "MPI_LOCALRANKID": "0",
    "MPI_LOCALNRANKS": "2",
    "MASTER_ADDR": "node1",
}
CASES = {
    "nothing": ({}, (None, 0, 1, 0, 1, "env://")),
    "torchrun": (TORCHRUN, ("torchrun", 5, 16, 1, 4, "env://")),
    "one torchrun a node, by srun": (SRUN | TORCHRUN, ("torchrun", 5, 16, 1, 4, "env://")),
    "srun": (SRUN, ("srun", 9, 12, 1, 4, "tcp://gpu007:18456")),
    "srun, own port": (SRUN | {"MASTER_PORT": "6000"}, ("srun", 9, 12, 1, 4, "tcp://gpu007:6000")),
    "srun, own host": (SRUN | {"MASTER_ADDR": "10.0.0.1"}, ("srun", 9, 12, 1, 4, "tcp://10.0.0.1:18456")),
    "a batch script": ({k: v for k, v in SRUN.items() if k != "SLURM_STEP_ID"}, (None, 0, 1, 0, 1, "env://")),
    "Open MPI": (OPEN_MPI, ("mpirun", 3, 4, 3, 4, "tcp://127.0.0.1:29500")),
    "Open MPI in a Slurm job": (SRUN | OPEN_MPI, ("mpirun", 3, 4, 3, 4, "tcp://gpu007:18456")),
    "MPICH": (MPICH, ("mpirun", 2, 4, 0, 2, "tcp://node1:29500")),
    "by hand": ({"RANK": "1", "WORLD_SIZE": "2"}, ("hand", 1, 2, 1, 2, "tcp://127.0.0.1:29500")),
}


@pytest.mark.parametrize("name", CASES)
def test_each_launcher_is_recognized(name):
    values, expected = CASES[name]
    found = read_environment(values)
    assert found.problems == ()
    assert (
        found.launcher, found.rank, found.world_size, found.local_rank, found.local_world_size, found.rendezvous
    ) == expected  # fmt: skip


@pytest.mark.parametrize(
    ("slurm", "ending"),
    [
        ({"SLURM_JOB_NUM_NODES": "8"}, "; SLURM_JOB_NUM_NODES is 8, and torchrun (--nnodes) has 4"),
        ({"SLURM_JOB_NUM_NODES": "8", "SLURM_STEP_NUM_NODES": "4"}, "MASTER_PORT)"),
        ({"SLURM_JOB_NUM_NODES": "4"}, "MASTER_PORT)"),
        ({}, "MASTER_PORT)"),
    ],
)
def test_torchrun_on_fewer_nodes_than_the_job_has_is_described(slurm, ending):
    assert read_environment(TORCHRUN | slurm).description.endswith(ending)


def test_the_variables_in_effect_are_described():
    assert read_environment(SRUN).description == (
        "SLURM_PROCID 9, SLURM_NTASKS 12; rendezvous at gpu007:18456 (SLURM_STEP_NODELIST, SLURM_JOB_ID)"
    )
    assert read_environment(OPEN_MPI).description.endswith("127.0.0.1:29500 (all ranks are on one host)")
    batch = {k: v for k, v in SRUN.items() if k != "SLURM_STEP_ID"}
    assert (
        read_environment(batch).description
        == "the Slurm job has 12 tasks, and srun did not start this process"
    )


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (SRUN | {"WORLD_SIZE": "16", "RANK": "9"}, "WORLD_SIZE is 16, and SLURM_NTASKS is 12"),
        (SRUN | {"WORLD_SIZE": "16"}, "SLURM_NTASKS is 12, and WORLD_SIZE is 16\n  fix: unset WORLD_SIZE"),
        (SRUN | {"WORLD_SIZE": "12", "RANK": "0"}, "RANK is 0, and SLURM_PROCID is 9\n  fix: unset RANK"),
        (OPEN_MPI | {"WORLD_SIZE": "2", "RANK": "1"}, "WORLD_SIZE is 2, and OMPI_COMM_WORLD_SIZE is 4"),
        (OPEN_MPI | {"RANK": "1"}, "OMPI_COMM_WORLD_RANK is 3, and RANK is 1\n  fix: unset RANK"),
        ({"WORLD_SIZE": "8"}, "WORLD_SIZE is 8, and RANK is not set\n  fix: set RANK for each process"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK 2 is not below WORLD_SIZE 2\n  fix: number the ranks from 0 to 1"),
        ({"RANK": "two", "WORLD_SIZE": "2"}, "RANK is 'two', not a whole number\n  fix: set or unset RANK"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "MASTER_ADDR is not set, and 4 ranks on several hosts"),
    ],
)  # fmt: skip
def test_contradictions_name_both_variables(values, words):
    problems = [str(problem) for problem in read_environment(values).problems]
    assert any(problem.startswith(words) for problem in problems), problems


def test_torchrun_has_precedence_over_slurm():
    assert read_environment(SRUN | TORCHRUN | {"SLURM_NTASKS": "4"}).problems == ()


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node1", "node1"), ("node1,node2", "node1"), ("gpu[007-010,12],login1", "gpu007"), ("r[1-2]n[03,4]", "r1n03"),
        ("a-b[9]", "a-b9"), ("n[1-2].cluster,x", "n1.cluster"),
    ],
)  # fmt: skip
def test_the_first_host_of_slurms_short_form(nodes, host):
    assert first_host(nodes) == host


def test_gpus_that_slurm_binds_are_known():
    assert not read_environment(SRUN).binds_gpus
    assert read_environment(SRUN | {"SLURM_GPUS_PER_TASK": "1"}).binds_gpus
    by_hand = {"RANK": "5", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "SLURM_GPUS_PER_TASK": "1"}
    assert read_environment(SRUN | by_hand).binds_gpus
    assert not read_environment(SRUN | TORCHRUN | {"SLURM_GPUS_PER_TASK": "1"}).binds_gpus
    assert read_environment(SRUN | {"SLURM_TRES_PER_TASK": "cpu:4,gres/gpu:1"}).binds_gpus
