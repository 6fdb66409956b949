"""`megatrain port` prints the command for here, what changed and why, what is open, and whether it would start."""

import shlex
from pathlib import Path

import pytest

from megatrain.config import parse
from megatrain.tools.main import main

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.fixture
def port(capsys):
    """Return the exit code, the printed command, and the lines of each section below it."""

    def run(file, *arguments):
        code = main(["port", str(file), *arguments])
        command, _, below = capsys.readouterr().out.partition("\n#\n")
        sections = {}
        for block in below.split("\n#\n"):
            title, *lines = [line.removeprefix("#").strip() for line in block.splitlines()]
            sections[title.removeprefix("# ")] = lines
        return code, command, sections

    return run


@pytest.fixture
def script(tmp_path):
    def write(text, name="run.sh"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


SMALL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128"
    " --micro-batch-size 1 --train-iters 10 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 99"
)


def flags_of(command):
    """Return the arguments of the printed command, as a shell reads them."""
    words = shlex.split(command.replace("\\\n", " "))
    return words[words.index("pretrain.py") + 1 :]


def test_a_script_of_arrays_starts(port):
    code, command, sections = port(SCRIPTS / "arrays.sh")
    assert code == 0
    assert command.startswith(
        'torchrun --nproc_per_node 8 --nnodes 2 --master_addr "${MASTER_ADDR:-localhost}" pretrain.py \\\n'
    )
    assert '--save "${1}" \\\n' in command
    assert command.endswith("  ${1} \\\n  ${2}")  # "$@"
    request = parse(flags_of(command)[:-2])
    assert request.problems == ()
    config = request.config
    assert (config.model.num_layers, config.training.global_batch_size, config.optimizer.lr) == (
        32,
        256,
        1.5e-4,
    )
    assert config.logging.wandb_exp_name == "dense 7B"
    assert sections["changed"] == [
        "pretrain_gpt.py -> pretrain.py",
        "--layernorm-epsilon -> --norm-epsilon: the name here",
    ]
    left_out = "\n".join(sections["left out"])
    assert "export CUDA_DEVICE_MAX_CONNECTIONS=1: not needed" in left_out
    assert 'arrays.sh:38: mkdir -p "${1}"' in left_out
    assert "arrays.sh:46: tee train.log" in left_out
    assert "arrays.sh:33: `[[ $SAVE_MEMORY == 1 ]]` needs ${SAVE_MEMORY}" in sections["not certain"][0]
    assert sections["with Slurm"][0].startswith(
        "sbatch --nodes=2 --gpus-per-node=8 scripts/slurm/torchrun.sh "
    )
    assert any(line.startswith("--use-mcore-models is ignored: ") for line in sections["changes nothing"])
    assert any(line.startswith("norms are recomputed") for line in sections["costs speed or memory"])
    assert "--lr 3e-4: given again later" in left_out
    assert [line.rpartition(": ")[2] for line in sections["assumed"]] == [
        "NUM_HOSTS=2", "TP=2",
    ]  # fmt: skip
    open_parts = "\n".join(sections["open"])
    for name in ("${1}", "${2}", "${VOCAB}", "${MERGES}", "${MASTER_ADDR:-localhost}"):
        assert f"{name}: " in open_parts
    (end,) = (lines for title, lines in sections.items() if title.startswith("It starts on 16 ranks"))
    assert "--dry-run --world-size 16 " in end[0]


def test_a_script_of_strings_names_what_is_open_and_refused(port):
    code, command, sections = port(SCRIPTS / "one_string.sh")
    assert code == 1
    assert command.startswith("python -m torch.distributed.launch --nproc_per_node 8 --nnodes 1 pretrain.py")
    assert '--num-layers "$(python count_layers.py)" \\\n' in command
    assert "--moe-layer-freq '([0]*1+[1]*3)' \\\n" in command
    assert "--micro-batch-size 2" in command
    assert "--position-embedding-type rope" in command
    assert "--fp4-format e2m1" in command
    problems = "\n".join(sections["It does not start on 8 ranks:"])
    assert "--num-layers $(python count_layers.py) is not a whole number" in problems
    assert "one_string.sh LAYERS=VALUE" in problems
    assert "--fp4-format e2m1" in problems


def test_the_fix_of_an_open_value_resolves(port):
    code, command, sections = port(SCRIPTS / "one_string.sh", "LAYERS=4")
    (problems,) = (lines for title, lines in sections.items() if title.startswith("It does not start"))
    assert code == 1
    assert "--num-layers 4 " in command
    assert [line for line in problems if line[0].isdigit()] == [
        line for line in problems if "--fp4-format e2m1" in line
    ]


def test_a_slurm_script_keeps_its_launcher(port):
    code, command, sections = port(SCRIPTS / "slurm.sbatch")
    assert code == 0
    assert command.startswith(
        'srun -l "--output=${PWD}/logs/$(date +%y-%m-%d).log" sh -c "python -u pretrain.py \\\n'
    )
    assert command.endswith('--tensorboard-dir \\"${PWD}/tensorboard/\\${SLURM_JOB_ID}\\""')
    assert any(title.startswith("It starts on 32 ranks") for title in sections)
    left_out = "\n".join(sections["left out"])
    assert "slurm.sbatch:7: ./environment.sh: no script that can be read" in left_out
    assert "slurm.sbatch:25: cd" in left_out
    assert any(line.endswith("STAMP=VALUE gives it") for line in sections["open"])
    line, ntasks = sections["with Slurm"]
    assert line.startswith(
        "sbatch --nodes=4 --gpus-per-node=8 --ntasks-per-node=8 --job-name=pretrain --time=04:00:00 scripts/slurm/srun.sh"
    )
    assert ntasks.startswith("#SBATCH --ntasks-per-node=8: scripts/slurm/srun.sh sets")


def test_a_script_of_functions_and_cases_starts_on_64_ranks(port):
    code, command, sections = port(SCRIPTS / "dense_fp8.sh", "2=/tensorboard")
    assert code == 0
    assert any(title.startswith("It starts on 64 ranks") for title in sections)
    assert command.startswith("export NCCL_IB_TIMEOUT=22\ntorchrun ")
    assert '--node_rank "${NODE_RANK:-0}" --master_addr "${MASTER_ADDR:-localhost}"' in command
    config = parse(flags_of(command)).config
    assert config.training.global_batch_size == 128
    assert config.precision.fp8_format == "hybrid"
    assert config.checkpoint.save == "/lustre/checkpoints/dense 8b"
    _, command, _ = port(SCRIPTS / "dense_fp8.sh", "PRECISION=bf16", "SIZE=70b", "3=/data/text")
    assert "fp8" not in command
    for words in ("--num-layers 80", "--tensor-model-parallel-size 8", "--data-path /data/text"):
        assert words in command


def test_a_script_of_experts_keeps_the_variables_of_slurm(port):
    code, command, sections = port(SCRIPTS / "experts.sbatch")
    assert code == 0
    assert command.startswith("export NCCL_DEBUG=WARN\nsrun --mpi=none bash -c ")
    assert '--node_rank \\"\\${SLURM_NODEID}\\"' in command
    assert "--global-batch-size 256" in command  # of 64 ranks, by the #SBATCH lines
    assert "--expert-model-parallel-size 8" in command
    kept = "\n".join(sections["kept"])
    for words in ("export NCCL_DEBUG", "module load cuda/12.8", "ulimit -n 65536"):
        assert words in kept
    assert "--partition=train --time=12:00:00 scripts/slurm/torchrun.sh" in sections["with Slurm"][0]


def test_a_yaml_file_becomes_a_command(port):
    code, command, sections = port(SCRIPTS / "arguments.yaml", "DATA=/data")
    assert code == 0
    assert command.startswith("torchrun --standalone --nproc-per-node 2 pretrain.py \\\n")
    assert "--data-path /data/text_document \\\n" in command
    assert '--save "${OUTPUT}" \\\n' in command
    assert "--seq-length 1024" in command
    assert "--recompute-modules mlp \\\n" in command
    assert "swiglu" not in command
    assert "ENV_VARS are ignored" in sections["left out"][0]
    assert sections["assumed"][0].startswith("2 ranks")
    assert "${OUTPUT}: " in sections["open"][0]


def test_the_number_of_ranks_can_be_given(port):
    _, command, sections = port(SCRIPTS / "arguments.yaml", "--world-size", "16")
    rendezvous = "--rdzv-backend c10d --rdzv-endpoint HOST:29500"
    assert command.startswith(f"torchrun --nnodes 2 --nproc-per-node 8 {rendezvous} pretrain.py")
    assert "assumed" not in sections


@pytest.mark.parametrize(
    ("launch", "num_ranks"),
    [
        ("python pretrain_gpt.py", 1),
        ("torchrun --nproc-per-node=4 pretrain_gpt.py", 4),
        ("torchrun --nnodes 2:4 --nproc_per_node 4 pretrain_gpt.py", 8),
        ("python -m torch.distributed.run --nproc-per-node $GPUS pretrain_gpt.py", 1),
        ("mpirun -np 6 python pretrain_gpt.py", 6),
        ("srun -n 3 python pretrain_gpt.py", 3),
        ("srun -N 2 --ntasks-per-node 4 python pretrain_gpt.py", 8),
        ("#SBATCH -N 3\ntorchrun --nnodes $SLURM_NNODES --nproc-per-node 2 pretrain_gpt.py", 6),
        ("bash -c 'torchrun --nproc-per-node 2 --node_rank $SLURM_NODEID /a/pretrain_gpt.py'", 2),
    ],
)
def test_the_launcher_names_the_number_of_ranks(port, script, launch, num_ranks):
    launch = launch.replace("pretrain_gpt.py", f"pretrain_gpt.py {SMALL}")
    code, _, sections = port(script(launch))
    assert code == 0
    words = "1 rank," if num_ranks == 1 else f"{num_ranks} ranks,"
    assert any(title.startswith(f"It starts on {words}") for title in sections)


@pytest.mark.parametrize(("nnodes", "ranks"), [("", 8), ("--nnodes 1 ", 8), ("--nnodes 3 ", 24)])
def test_nodes_of_a_job_that_torchrun_does_not_use_are_named(port, script, nnodes, ranks):
    job = script(
        f"#SBATCH --nodes=8 --gpus-per-node=8\nsrun torchrun {nnodes}--nproc-per-node 8 pretrain_gpt.py {SMALL}"
    )
    _, _, sections = port(job)
    assert any(title.startswith(f"It starts on {ranks} ranks") for title in sections)
    (line,) = sections["not certain"]
    assert f"8 nodes (--nodes), and torchrun starts the {ranks} ranks of {ranks // 8} (--nnodes)" in line
    assert "--world-size 64" in line
    _, _, sections = port(job, "--world-size", "64")
    assert "not certain" not in sections
    assert sections["with Slurm"][0].startswith(
        "sbatch --nodes=8 --gpus-per-node=8 scripts/slurm/torchrun.sh"
    )


def test_variables_of_an_inner_shell_stay_its_own(port, script):
    text = (
        f"srun bash -c 'torchrun --nproc-per-node 2 --node_rank $RANK --name \"$X\" pretrain_gpt.py {SMALL}'"
    )
    _, command, _ = port(script(text))
    assert command.startswith(
        'srun bash -c "torchrun --nproc-per-node 2 --node_rank \\"\\${RANK}\\" --name \\"${X}\\" pretrain'
    )
    assert command.endswith('--vocab-size 99"')


def test_a_script_that_submits_another_has_its_options_and_container(port, script):
    inner = script(
        "#SBATCH --gpus-per-node=8 --requeue\nmodule load cuda\nsrun --container-image=/i.sqsh --container-mounts $MOUNTS"
        f" torchrun --nnodes $SLURM_NNODES --nproc-per-node 8 pretrain_gpt.py {SMALL} --save $STAGE"
        " --global-batch-size $((SLURM_NNODES * 8))",
        "stage.sbatch",
    )
    code, command, sections = port(script(f"sbatch --nodes=8 -J name --export=ALL,STAGE=long {inner.name}"))
    assert code == 0
    assert command.startswith("export STAGE=long\nsrun --container-image=/i.sqsh --container-mounts ")
    assert command.endswith("--save long \\\n  --global-batch-size 64")
    assert any(title.startswith("It starts on 64 ranks") for title in sections)
    line, requeue = sections["with Slurm"]
    assert line.startswith(
        'CONTAINER_IMAGE=/i.sqsh CONTAINER_MOUNTS="${MOUNTS}" sbatch --nodes=8 --gpus-per-node=8 --job-name=name --export=ALL,STAGE=long'
    )
    assert requeue.startswith("#SBATCH --requeue: scripts/slurm/torchrun.sh")


def test_the_printed_command_sets_what_an_inner_shell_sets(port, script):
    _, command, sections = port(
        script(
            f"cd /a\nsrun -n 2 bash <<END\nexport RANK=\\$SLURM_PROCID\npython pretrain_gpt.py {SMALL}\nEND"
        )
    )
    assert command.startswith(
        'cd /a\nsrun -n 2 bash -c "export RANK=\\"\\${SLURM_PROCID}\\"; python pretrain.py \\\n'
    )
    assert sections["kept"] == ["cd /a: relative paths start there", "export RANK: launchers read it"]
    assert "left out" not in sections


def test_what_only_megatron_reads_is_not_kept(port, script):
    manager = "megatron.core.ssm.triton_cache_manager:ParallelFileCacheManager"
    text = f"export TRITON_CACHE_MANAGER={manager} MEGATRON_LOGGING_LEVEL=20 TRITON_CACHE_DIR=/t\npython pretrain_gpt.py {SMALL}"
    _, command, sections = port(script(text))
    assert command.startswith("export TRITON_CACHE_DIR=/t\npython")
    assert all(line.endswith("Megatron-LM's modules are not imported") for line in sections["left out"])


@pytest.mark.parametrize("end", ["\n", " \\\n # a comment\n"])
def test_flags_after_the_end_of_the_command_are_a_problem(port, script, end):
    code, _, sections = port(script(f"python pretrain_gpt.py {SMALL}{end} --save x"))
    assert code == 1
    assert "run.sh:3: --save x is a command" in sections["It does not start on 1 rank:"][0].replace(
        "sh:2", "sh:3"
    )


def test_arguments_that_a_script_passes_on_are_open(port, script):
    text = f'function f {{ echo "$1"; }}\nfor (( i = 0; i < 2; i++ )); do :; done\npython pretrain_gpt.py {SMALL} --save $(f a) "$@"'
    _, command, sections = port(script(text))
    assert command.endswith("--save a")
    assert sections["open"][0].startswith('"$@": the arguments of ')
    assert "not certain" not in sections


def test_a_default_may_be_another_variable(port, script):
    text = f"SAVE=$1\nLOAD=${{LOAD:-$SAVE/last}}\npython pretrain_gpt.py {SMALL} --load $LOAD"
    _, command, sections = port(script(text))
    assert command.endswith('--load "${1}/last"')
    assert sections["open"] == [f"${{1}}: given to {script(text)} as an argument"]
    assert sections["assumed"][0].endswith("run.sh:2: LOAD=$SAVE/last")


def test_eval_is_replaced_by_its_command(port, script):
    code, command, _ = port(script(f'CMD="python pretrain_gpt.py {SMALL} --save \\$OUT"\neval $CMD'))
    assert code == 0
    assert command.startswith("python pretrain.py")
    assert command.endswith('--save "${OUT}"')


def test_another_training_command_is_named(port, script):
    code, _, sections = port(script(f"python pretrain_gpt.py {SMALL}\npython pretrain_gpt.py"))
    assert code == 0
    assert sections["left out"][0].endswith("run.sh:2: another training command: left out")


def test_words_that_may_be_flags_stay(port, script):
    code, command, _ = port(script(f"python pretrain_gpt.py {SMALL} --bf16 $EXTRA --save $OUT $MORE"))
    assert code == 0
    assert command.endswith('--bf16 \\\n  ${EXTRA} \\\n  --save "${OUT}" \\\n  ${MORE}')


def test_a_program_of_hybrid_models_names_the_family(port, script):
    _, _, sections = port(script(f"python pretrain_mamba.py {SMALL}"))
    assert sections["changed"][0] == "pretrain_mamba.py -> pretrain.py --model-family hybrid"


@pytest.mark.parametrize(
    ("arguments", "text", "fix"),
    [
        (["no.sh"], "no.sh: No such file", "readable"),
        (["no.yaml"], "no.yaml: No such file", "readable"),
        ([str(SCRIPTS / "arguments.yaml"), "X"], "X is not NAME=VALUE", "NAME=VALUE"),
    ],
)
def test_a_mistake_is_an_error_with_exit_code_2(capsys, arguments, text, fix):
    assert main(["port", *arguments]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert fix in error.partition("fix: ")[2]


def test_a_script_without_a_training_command_is_an_error(capsys, script):
    assert main(["port", str(script("echo pretrain_gpt.py\nls"))]) == 2
    assert "no command runs a pretrain_*.py" in capsys.readouterr().err


def test_the_program_that_runs_instead_is_named(capsys, script):
    assert main(["port", str(script("python prepare.py\ntorchrun lab/train_mimo.py --num-layers 2"))]) == 2
    error = capsys.readouterr().err
    assert "run.sh:2 runs lab/train_mimo.py" in error
    assert "prepare.py" not in error


@pytest.mark.parametrize(("family", "more"), [("bert", ""), ("t5", "--decoder-seq-length 32"), ("vlm", "")])
def test_the_program_names_the_family(port, script, family, more):
    code, command, sections = port(script(f"torchrun a/pretrain_{family}.py {SMALL} {more}"))
    assert code == 0
    assert flags_of(command)[:2] == ["--model-family", family]
    assert parse(flags_of(command)).config.model.model_family == family
    assert sections["changed"] == [f"a/pretrain_{family}.py -> pretrain.py --model-family {family}"]


def test_a_program_of_another_model_is_a_problem(port, script):
    code, _, sections = port(script(f"python pretrain_retro.py {SMALL}"))
    (problems,) = (lines for title, lines in sections.items() if title.startswith("It does not start"))
    assert code == 1
    assert (
        "pretrain_retro.py trains another model than a GPT, BERT, T5, a hybrid or a vision-language model"
        in "\n".join(problems)
    )
    assert (
        "use a script of pretrain_gpt.py, pretrain_bert.py, pretrain_t5.py, pretrain_vlm.py, pretrain_hybrid.py or"
        in "\n".join(problems)
    )
