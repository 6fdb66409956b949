"""A shell script is read without being executed: words, variables, arrays, conditions, quotes."""

import pytest

from megatrain.tools.port.shell_script import ShellScript, plain, quoted


def read(text, **given):
    """Return the script and its commands as lists of printed words."""
    script = ShellScript("run.sh", given)
    return script, [[quoted(word) for word in command.words] for command in script.commands(text)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("run a  b # comment", "run a b"),
        ("run a \\\n  b", "run a b"),
        ("run 'a b' \"c d\" e\\ f", "run 'a b' 'c d' 'e f'"),
        ("run a'b'\"c\"d", "run abcd"),
        ("run a#b --x=#c", "run 'a#b' '--x=#c'"),
        ('run "" end', "run '' end"),
        ('run "a\\"b" "c\\\\d"', "run 'a\"b' 'c\\d'"),
        ("A=1; run $A ${A}", "run 1 1"),
        ("A='1 2'; run $A \"$A\" x${A}y", "run 1 2 '1 2' x1 2y"),
        ('A=; run $A "$A" end', "run '' end"),
        ('run ${A:-7} ${A-8} "${A:-9 0}"', "run 7 8 '9 0'"),
        ("A=1; B=${A:-2}${C:-3}; run $B", "run 13"),
        ("A=1; A+=2; run $A", "run 12"),
        ("A=(1 '2 3' 4); run ${A[@]}", "run 1 2 3 4"),
        ("A=(1 '2 3' 4); run \"${A[@]}\"", "run 1 '2 3' 4"),
        ('A=(1 2); run x"${A[@]}"y', "run x1 2y"),
        ("A=(1); A+=(2 # two\n 3); run ${A[*]} $A", "run 1 2 3 1"),
        ("A=(1 '2 3'); run \"x ${A[*]} y\"", "run 'x 1 2 3 y'"),
        ('A=(); A+=(1); B+=2; run "${A[@]}" $B', "run 1 2"),
        ('A=(); run "${A[@]}" end', "run end"),
        ("export A=1 B=2; local C=3; run $A $B $C", "run 1 2 3"),
        ("A=1 run x", "A=1 run x"),
        ("A=1 && run $A", "run 1"),
        ("run a 2>&1 > log.txt b", "run a b"),
        ("run 2 > log.txt", "run 2"),
        ("cat << END\nrun $A\nEND\nrun b", "cat|run b"),
        ("run a; run b && run c | tee x", "run a|run b|run c|tee x"),
        ("for i in 1 2; do run $i; done", "i in 1 2|run $i"),
        ("function f {\n run a\n}\ng() { run b; }", "run a|run b"),
    ],
)  # fmt: skip
def test_words_are_those_of_a_shell(text, words):
    _, commands = read(text)
    assert "|".join(" ".join(command) for command in commands) == words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('run $1 "$1" ${CKPT} x/$A "my $A"', 'run $1 "$1" ${CKPT} x/$A "my $A"'),
        ('run "$@" $* ${#A} ${A%.*}', 'run "$@" $* ${#A} ${A%.*}'),
        ("run $(date +%s) `id -u` $((1 + 2))", "run $(date +%s) `id -u` $((1 + 2))"),
        ("A=$1; B=$(date); run $A ${B}", "run $A ${B}"),
        ('A=$1; B=$A/x; run $B "$B"', 'run $A/x "$A/x"'),
        ("A=$1; run ${A:-7}", "run ${A:-7}"),
        ('run \\$A "\\$A b"', 'run \\$A "\\$A b"'),
        ("run '$A'", "run '$A'"),
    ],
)  # fmt: skip
def test_what_cannot_be_known_stays_as_it_is(text, words):
    _, (command,) = read(text)
    assert " ".join(command) == words


def test_an_open_variable_has_the_place_of_its_assignment():
    script, _ = read("A=1\nCKPT=$1\nSTAMP=$(date)\nif x; then\n  B=2\nfi\n[ -d x ] && C=3\nrun")
    assert script.open == {
        "CKPT": "run.sh:2: CKPT=$1",
        "STAMP": "run.sh:3: STAMP=$(date)",
        "B": "run.sh:5: assigned under a condition",
        "C": "run.sh:7: assigned under a condition",
    }


@pytest.mark.parametrize("extension", ["A+=(--b)", "A=(${A[@]} --b)", 'A="$A --b"'])
def test_an_extension_under_a_condition_is_left_out(extension):
    script, commands = read(f"A=(--a)\nif [ $X = 1 ]; then\n  {extension}\nfi\nrun ${{A[@]}}")
    assert commands[-1] == ["run", "--a"]
    assert script.not_read == ["run.sh:3: A is extended under a condition: left out"]


def test_defaults_are_assumed_and_given_values_count():
    script, (command,) = read("A=${A:-1}\nB=2\nrun $A $B ${C:-3}")
    assert command == ["run", "1", "2", "3"]
    assert list(script.assumed.values()) == ["run.sh:1: A=1", "run.sh:3: C=3"]
    script, (command,) = read("A=${A:-1}\nB=$(x)\nrun $A $B ${C:-3}", A="7", B="8", C="9")
    assert command == ["run", "7", "8", "9"]
    assert not script.assumed
    assert not script.open


def test_files_that_a_script_sources_are_named():
    script, _ = read("source env.sh\n. other.sh")
    assert [line.partition(": ")[2] for line in script.not_read] == [
        "source env.sh: the file is not read",
        ". other.sh: the file is not read",
    ]


def test_commands_know_their_line_and_what_follows():
    script = ShellScript("run.sh", {})
    first, second = script.commands("A=(1\n 2)\nrun \\\n  a | b\n")
    assert (first.line, first.following, plain(first.words[1])) == (3, "|", "a")
    assert (second.line, second.following, second.is_nested) == (4, "", False)


@pytest.mark.parametrize(
    "text", ["run 'a", 'run "a', "run $(a", "run ${a", "A=(1 2", "run `a", "cat <<E\nx", "run \\"]
)
def test_an_unfinished_script_is_read_to_its_end(text):
    read(text)
