"""bash evaluates a launch script: its words are those of bash, and nothing that a script does has an effect."""

import contextlib
import os
import re
import socket
from pathlib import Path

import pytest

from megatrain.config import InputError
from megatrain.tools.port import evaluate as module
from megatrain.tools.port.evaluate import evaluate
from megatrain.tools.port.words import quoted


@pytest.fixture
def read(tmp_path):
    """Return the evaluation of a text."""

    def run(text, numbers=(), **known):
        path = tmp_path / "run.sh"
        path.write_text(text)
        return evaluate(
            str(path), {name.removeprefix("_"): value for name, value in known.items()}, dict(numbers)
        )

    return run


def texts(found):
    return [command.text for command in found.commands]


def outcomes(read, cases, *arguments, **known):
    """Evaluate the texts of all cases in one script, each in a subshell; return the commands of each."""
    text = "".join(f"(\n{case}\n)\nend\n" for case in cases)
    found = "|".join(texts(read(text, *arguments, **known))).split("end")
    return {case: commands.strip("|") for case, commands in zip(cases, found, strict=False)}


MEANT = {
    'run \'a b\' "c d" e\\ f \'\' "a\\"b"': "run 'a b' 'c d' 'e f' '' 'a\"b'",
    "A=(1 '2 3'); A+=(4 # four\n 5); run \"${A[@]}\" ${#A[@]}": "run 1 '2 3' 4 5 4",
    "A='1 2'; run $A \"$A\" ${A/1/7} $((3 * 4))": "run 1 2 '1 2' 7 2 12",
    "if [ 8 -gt 4 ]; then A=big; else A=small; fi; run $A": "run big",
    "case 7b in 7b) L=32 ;; *) L=80 ;; esac; run $L": "run 32",
    "f() { local x=$1; echo --layers $((x * 2)); }; run $(f 8)": "run --layers 16",
    'for i in $(seq 2); do A+=" --x $i"; done; run $A': "run --x 1 --x 2",
    "declare -A SIZE=([7b]=4096 [13b]=5120); run ${SIZE[13b]}": "run 5120",
    "read -r -d '' A <<END\n--x 1\n--y 2\nEND\nrun $A": "run --x 1 --y 2",
    "A=$(cat <<END\n--x $((1+1))\nEND\n); run $A": "run --x 2",
    "run a > log 2>&1": "run a",
    "{ run a; } >> log": "run a",
    "eval \"run a 'b c' > log\"": "run a 'b c'",
    "(cd /x/y && run $PWD)": "cd /x/y|run /x/y",
    "set -e\nsrun bash <<END\nset -e\ncd /x\nrun $((1 + 1))\nEND": "cd /x|run 2",
    "sh -s <<< 'run a'; bash run.txt": "run a|bash run.txt",
    "ssh n1 'cd /x; torchrun pretrain_gpt.py'; ssh n1 uptime 'all of it'": "cd /x|torchrun pretrain_gpt.py|ssh n1 uptime 'all of it'",
    "[ ! -f a ] && { echo none; exit 1; }; [[ -d b ]] || exit 2; run a": "run a",
    "if [ ! -f a ]; then [ 1 = 1 ] && exit 1; fi; run a": "",
    "A+=( '--x 1'\n  '--y 2' ); run ${A[@]}": "run --x 1 --y 2",
    'run $(</x/a) "$(< b)"': 'cat /x/a|cat b|run "$(cat /x/a)" "$(cat b)"',
    "/opt/bin/run a; ./tool b; X=1 $PROGRAM c": "/opt/bin/run a|./tool b|tool c",
    "exec run a": "run a",
    "set -euo pipefail; mkdir -p x; run a | tee log": "mkdir -p x|run a|tee log",
    "export A=1 PATH=/x:$PATH; command run $A": "run 1",
    "run $(basename /a/b.sh .sh) $(dirname /a/b.sh) ${A:-7} ${B-8}": "run b /a 7 8",
    "while [ $# -gt 0 ]; do shift; done; run $#": "run 0",
}


def test_a_script_means_what_it_means_in_bash(read):
    assert outcomes(read, MEANT, PROGRAM="tool") == MEANT


OPEN = {
    'run $1 "$2/x"': 'run "${1}" "${2}/x"',
    "CKPT=$1; run ${CKPT}/a": 'run "${1}/a"',
    'CKPT=${3:-"/lustre/a"}; run $CKPT': "run /lustre/a",
    "SAVE=$1; LOAD=${LOAD:-$SAVE}; run $LOAD ${OUT:-${SAVE}/out}": 'run "${1}" "${1}/out"',
    "RUN=${RUN:-$(date +%s)}; run $RUN": 'date +%s|run "$(date +%s)"',
    "NODE=${SLURM_NODEID:-0}; run $NODE $MASTER_ADDR": 'run "${SLURM_NODEID:-0}" "${MASTER_ADDR}"',
    "run x$(date +%s) `id -u`": 'date +%s|id -u|run "x$(date +%s)" "$(id -u)"',
    "H=$(scontrol show hostnames $L | head -n 1); run $H": 'scontrol show hostnames "${L}"|head -n 1|run "$(scontrol show hostnames ${L} | head -n 1)"',
    "run $((8 * SLURM_NNODES)) $SLURM_NNODES": 'run 32 "${SLURM_NNODES}"',
    'if [ -z "$GPUS" ]; then GPUS=8; fi; run $GPUS': "run 8",
    "run $TP": "run 4",
    "TP=2; run $TP": "run 4",
    "srun -w $1 inner.sh": 'srun -w "${1}" inner.sh',
    "srun bash -c 'run $SLURM_PROCID '$1": 'run "\\${SLURM_PROCID}" "${1}"',
}


def test_values_of_the_caller_and_of_launchers_stay_variables(read):
    assert outcomes(read, OPEN, {"SLURM_NNODES": 4}, TP="4") == OPEN


def test_files_are_read_where_a_script_sources_or_starts_them(read, tmp_path):
    (tmp_path / "env.sh").write_text("declare -a MORE=(--x 1)\nTP=8\nexport NCCL_DEBUG=INFO")
    (tmp_path / "inner.sh").write_text("run $1\n\nrun two")
    found = read('source env.sh\nrun "${MORE[@]}" $TP\nbash inner.sh one\n. lost.sh')
    assert [(one.text, one.place.removeprefix(f"{tmp_path}/")) for one in found.commands] == [
        ("run --x 1 8", "run.sh:2"),
        ("bash run one", "inner.sh:1"),
        ("bash run two", "inner.sh:3"),
    ]
    assert found.not_read == [f"{tmp_path}/run.sh:4: lost.sh: no script that can be read: left out"]


def test_a_training_command_has_its_environment_and_wrapper(read):
    found = read("export A=1 B=$1\nsrun -l sh -c \"torchrun pretrain_gpt.py --x '1 2'\"")
    (command,) = found.commands
    assert [word[0].text for word in command.wrapper] == ["srun", "-l", "sh", "-c"]
    assert command.text == "torchrun pretrain_gpt.py --x '1 2'"
    assert {name: value[0].text for name, value in command.exports.items()} == {"A": "1", "B": "${1}"}


@pytest.mark.parametrize(
    "launch", ["srun bash -c '{}'", "srun bash <<'END'\n{}\nEND", "ssh n1 '{}'", "srun $HOSTS inner.sh"]
)
def test_what_an_inner_shell_exports_stays_there(read, tmp_path, launch):
    inner = "cd /work\nexport RANK=$SLURM_PROCID NCCL_DEBUG=$LEVEL\npython pretrain_gpt.py --name $RANK"
    (tmp_path / "inner.sh").write_text(inner)
    found = read(f"cd /start\nexport OUTER=1 LEVEL=INFO\n{launch.format(inner)}")
    command = found.commands[-1]
    assert {name: quoted(value) for name, value in command.inner_exports.items()} == {
        "PWD": "/work",
        "RANK": '"\\${SLURM_PROCID}"',
        "NCCL_DEBUG": "INFO",
    }
    assert {name: quoted(value) for name, value in command.exports.items()} == {
        "PWD": "/start",
        "OUTER": "1",
        "LEVEL": "INFO",
    }
    assert ('"${HOSTS}"' in map(quoted, command.wrapper)) == ("HOSTS" in launch)
    assert command.text == 'python pretrain_gpt.py --name "\\${SLURM_PROCID}"'


def test_a_script_that_stops_for_lack_of_a_file_goes_on(read):
    found = read(
        "set -e\nif [ ! -f pretrain_gpt.py ]; then\n  echo 'no such \"file'\n  exit 1\nfi\ntorchrun pretrain_gpt.py"
    )
    assert texts(found) == ["torchrun pretrain_gpt.py"]
    assert found.uncertain[-1].endswith("run.sh:4: `exit 1` is passed over: the file before it may be there")


def test_a_script_that_ends_before_its_command_is_no_syntax_error(read):
    found = read('A=( "--x 1"\n "--y 2" )\nexit 3')
    assert found.exit.endswith("run.sh:3: exit 3")


def test_tests_of_what_is_not_known_are_named_with_their_line(read):
    found = read("A=1\n[[ $A == 1 ]]\n[[ $MODE == fp8 ]]\nif [ -f x ]; then A=2; fi\nB=${HERE%/*}\nrun $MODE")
    places = [line.partition("run.sh:")[2] for line in found.uncertain]
    assert places == [
        "3: `[[ $MODE == fp8 ]]` needs ${MODE}",
        "4: `[ -f x ]` needs a file, and no file is looked at",
        "5: `B=${HERE%/*}` needs ${HERE}",
    ]


HOSTILE = (
    "/bin/touch {made}", "touch {made}", "PATH=/bin:/usr/bin touch {made}", "PATH=/bin:/usr/bin; touch {made}",
    "exec /bin/touch {made}", "builtin exec /bin/touch {made}", "command -p touch {made}", "echo x > {made}",
    "echo x >> {kept}", ": > {kept}", "echo x >| {kept}", "exec 5<>{kept}; echo x >&5", "hash -p /bin/touch t; t {made}",
    "coproc /bin/touch {made}", "echo x > >(/bin/touch {made})", "set -o posix; exec /bin/touch {made}", "unset -f exec; exec /bin/touch {made}",
    "trap '/bin/touch {made}' EXIT", "eval 'unset -f touch; builtin eval /bin/touch {made}'", "history -w {made}", "HISTFILE={made}; set -o history; history -a",
    "enable -f {kept} x", "builtin enable -f {kept} x", "BASH_ENV={kept} bash -c 'touch {made}'",
    "builtin kill -9 {pid}", "kill -9 {pid}", "unset -f kill; kill -STOP {pid}", "x=$(< /dev/tcp/127.0.0.1/{port})", "exec 5<>/dev/tcp/127.0.0.1/{port}",
    "builtin trap - DEBUG; PATH=/bin; unset -f command_not_found_handle; /bin/touch {made}", "umask 0; builtin ulimit -f 0; /bin/rm {kept}",
    "a='x[$(/bin/touch {made})]'; echo $((a))", "mapfile -C '/bin/touch {made}' -c 1 <<< x", "source /dev/stdin <<< '/bin/touch {made}'",
)  # fmt: skip


def test_no_script_has_an_effect(read, tmp_path):
    made, kept = tmp_path / "made", tmp_path / "kept"
    kept.write_text("kept")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        values = {"made": made, "kept": kept, "pid": os.getpid(), "port": server.getsockname()[1]}
        lines = [
            re.sub(r"\{(made|kept|pid|port)\}", lambda match: str(values[match[1]]), line) for line in HOSTILE
        ]
        found = read(
            "".join(f"(\n{line}\n) < /dev/null\nreached {number}\n" for number, line in enumerate(lines))
        )
        with pytest.raises(BlockingIOError):
            server.accept()
    assert [text for text in texts(found) if text.startswith("reached")] == [
        f"reached {number}" for number in range(len(HOSTILE))
    ]
    assert not made.exists()
    assert kept.read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "run.sh"]


@pytest.mark.parametrize(
    "text",
    [
        "while :; do :; done",
        "set -m; (while :; do :; done) & (while :; do :; done) & wait",
        "read -t 1000 <&101",
    ],
)
def test_a_script_that_does_not_end_is_ended(read, monkeypatch, text):
    monkeypatch.setattr(module, "_SECONDS", 0.5)
    before = _children()
    found = read(f"run a\n{text}")
    assert texts(found)[0] == "run a"
    assert "it may loop" in found.not_read[-1]
    assert _children() <= before


def _children():
    """Return the processes that this one has started, other tests' too, without those that have ended."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == os.getpid() and state != "Z":
                found.add(path.parent.name)
    return found


@pytest.mark.parametrize("text", ["while :; do torchrun pretrain_gpt.py; done", "while :; do run x; done"])
def test_a_script_that_repeats_a_command_is_read_to_a_limit(read, monkeypatch, text):
    monkeypatch.setattr(module, "_COMMANDS", 50)
    found = read(text)
    assert "commands" in found.not_read[-1]
    assert 8 <= len(found.commands) <= 200


def test_forged_messages_and_closed_descriptors_are_left_out(read):
    found = read("printf 'junk\\0 1 C x\\0 9 Z 1\\0' >&101; run a; exec 101>&- 102<&-; run b")
    assert texts(found) == ["run a", "run b"]


def test_control_characters_do_not_reach_the_terminal(read):
    assert texts(read("run $'a\\e[2Jb' $1$'\\e[31m'")) == ["run $'a\\x1b[2Jb' \"${1}\\x1b[31m\""]


def test_a_text_that_is_no_script_is_an_error(read):
    with pytest.raises(InputError, match=r"syntax error.*\n.*bash -n"):
        read("if [ 1 ]; then\nrun 'a")
