# Evaluated before a script by the bash of sandbox.py: stand-ins for commands, which record their words and do nothing.
#
#   descriptor 101: messages `PID KIND LINE`, `PID +part of a word`, `PID =end of a word`, `PID .`, each ended by a zero byte
#     C ID INPUT WORDS...   a command; its output in the script is the word __port_c_ID__
#     E NAME=VALUE...       variables that the next command has in its environment; after __port_inner__: those that an
#                           inner shell sets itself
#     K TEXT NAMES...       a test or computation that reads variables with an open value, or looks for a file
#     X CODE                the script ends
#     S FILE                a file that is read; the answer on descriptor 102 is `NAME=NUMBER ...` and its text
#
# A variable with an open value has the word __port_v_NAME__, which is a variable with a number, for arithmetic.
shopt -u sourcepath
declare -A __port_given=()
declare -a __port_wrapper=()
declare -A __port_outer=()
__port_of_file=
declare -i __port_count=0
readonly GCONV_PATH LOCPATH

__port_send() {
    local word IFS=$' \t\n'
    printf '%s %s %s\0' "$BASHPID" "$1" "$2" >&101
    for word in "${@:3}"; do
        while ((${#word} > 500)); do
            printf '%s +%s\0' "$BASHPID" "${word:0:500}" >&101
            word=${word:500}
        done
        printf '%s =%s\0' "$BASHPID" "$word" >&101
    done
    printf '%s .\0' "$BASHPID" >&101
}

__port_command() { # LINE WORDS...
    local line=${__port_line-$1} input="" name id IFS=$' \t\n'
    local -a names=() inner=()
    shift
    case ${1##*/} in
        awk | cut | grep | head | jq | paste | rev | sed | sort | tail | tee | tr | uniq | wc | xargs)
            IFS= read -r -d '' input || : # up to the end
            ;;
    esac
    __port_count+=1
    id=${BASHPID}_$__port_count
    if [[ " $* " == *pretrain*.py* ]]; then
        for name in $(compgen -e) PWD; do
            if ((${#__port_outer[@]})) && [[ ${__port_outer[$name]-} != "=${!name}" ]]; then
                inner+=("$name=${!name}")
                [[ ! ${__port_outer[$name]-} ]] || names+=("$name${__port_outer[$name]}")
            else
                names+=("$name=${!name}")
            fi
        done
        __port_send E "$line" "${names[@]}" __port_inner__ "${inner[@]}"
    fi
    __port_send C "$line" "$id" "$input" ${__port_wrapper[@]+"${__port_wrapper[@]}"} "$@"
    printf '%s\n' "__port_c_${id}__"
}

__port_inner() { # LAUNCHER TEXT WORDS...: evaluate the text of an inner shell
    local name IFS=$' \t\n'
    case ${1##*/} in
        bash | sh | zsh | sbatch) ;; # runs where the script runs
        *) for name in $(compgen -e) PWD; do __port_outer[$name]=${__port_outer[$name]-"=${!name}"}; done ;;
    esac
    __script_run "${@:2}"
}

__port_call() { # LINE WORDS...: the text of `sh -c TEXT`, `sh <<END` and `ssh HOST TEXT` and other scripts are evaluated
    local -i at=2
    local word next text= is_started= is_remote=
    case ${2##*/} in ssh | pdsh | clush | pssh | tmux | su) is_remote=1 ;; esac
    case ${2##*/} in bash | sh | zsh | srun | sbatch | mpirun | mpiexec | nohup | env | singularity | apptainer) is_started=1 ;; esac
    while ((at <= $#)); do
        word=${!at} next=${@:at+1:1}
        case ${word##*/} in
            bash | sh | zsh)
                if [[ $next == -*c ]]; then
                    (
                        __port_wrapper+=("${@:2:at}" __port_inner__)
                        __port_line=${__port_line-$1}
                        __port_inner "$2" "${@:at+2:1}" "${@:at+4}"
                    )
                    return 0
                fi
                case $(($# - at)),$next in 0,* | *,- | *,-s | 1,-*) IFS= read -r -d '' text || : ;; esac
                if [[ $text == *[![:space:]]* ]]; then # `bash <<END`
                    (
                        __port_wrapper+=("${@:2:at-1}" -c __port_inner__)
                        __port_line=${__port_line-$1}
                        __port_inner "$2" "$text"
                    )
                    return 0
                fi
                ;;
            *.sh | *.bash | *.sbatch | *.slurm)
                if [[ $at == 2 || $is_started ]] && __port_read "$1" "$word"; then
                    (
                        ((at == 2)) || __port_wrapper+=("${@:2:at-2}" __port_script__)
                        IFS=,
                        for text in "${@:3:at-2}"; do # `sbatch --export=ALL,A=1`
                            [[ $text != --export=* ]] || for text in ${text#--export=}; do [[ $text != *=* ]] || export "$text"; done
                        done
                        IFS=$' \t\n'
                        __port_inner "$2" "$__port_file" "${@:at+1}"
                    )
                    return 0
                fi
                ;;
            *\ *pretrain*.py*)
                if [[ $is_remote ]]; then
                    (
                        __port_wrapper+=("${@:2:at-2}" __port_inner__)
                        __port_line=${__port_line-$1}
                        __port_inner "$2" "$word"
                    )
                    return 0
                fi
                ;;
        esac
        at+=1
    done
    __port_command "$@"
}

__port_read() { # LINE FILE: sets __port_file
    local names name IFS=$' \t\n'
    __port_send S "$1" "$2"
    IFS= read -r -d '' -u 102 names || builtin exit 1
    IFS= read -r -d '' -u 102 __port_file || builtin exit 1
    [[ $names == - ]] && return 1
    for name in $names; do
        [[ -v ${name%%=*} ]] || printf -v "${name%%=*}" %s "__port_v_${name%%=*}__"
        printf -v "__port_v_${name%%=*}__" %s "${name#*=}"
    done
}

__port_before() { # COMMAND LINE: before each command of the script
    local text=$1 first=$1 name is_test= IFS=$' \t\n'
    local -a names=()
    for name in "${!__port_given[@]}"; do
        printf -v "$name" %s "${__port_given[$name]}"
    done
    while [[ ${first%%[[:space:]]*} == [a-zA-Z_]*([a-zA-Z0-9_])?(+)=* && $first == *[[:space:]]* ]]; do
        first=${first#*[[:space:]]}
    done
    case ${first%%[[:space:]]*} in
        *[\(\)\`]*) ;;
        */* | [\"\$]*) __port_define "${first%%[[:space:]]*}" ;;
    esac
    case $text in
        '[['* | '['* | test\ * | case\ * | let\ * | *'(('*) is_test=1 ;;
        *'${'*) ;;
        *) return 0 ;;
    esac
    for name in ${text//[!a-zA-Z0-9_]/ }; do
        [[ $name == [a-zA-Z_]* && ${!name-} == *__port_[cv]_* ]] || continue
        [[ $is_test || $text == *"\${$name"?(\[[@*0-9]\])[%#/^,]* || $text == *"\${$name:"[0-9]* ]] && names+=("$name")
    done
    if [[ $is_test ]]; then __port_of_file=; fi
    case $text in '['*\ -[defrsxwL]\ * | test\ *-[defrsxwL]\ *) names+=(__port_file) __port_of_file=1 ;; esac
    if ((${#names[@]})); then __port_send K "${__port_line-$2}" "$text" "${names[@]}"; fi
    return 0  # of a trap: another status ends a script with `set -e`
}

__port_define() { # WORD: a command whose name is a path becomes a stand-in
    local words
    builtin eval "words=($1)" 2>&- || return  # a part of a quoted word is no command
    case ${words-} in
        *[!a-zA-Z0-9_./+-]*) ;;
        */*) builtin eval "function $words { __port_call \"\${BASH_LINENO[0]}\" $words \"\$@\"; }" ;;
    esac
}

command_not_found_handle() { __port_call "${BASH_LINENO[0]}" "$@"; }
for __port_name in awk cut cd date dirname grep head hostname id jq kill ls mkdir module nproc nvidia-smi paste popd \
    pushd python python3 readlink realpath rev scontrol sed sort srun tail tee torchrun tr trap ulimit umask uname uniq \
    wc which xargs; do
    builtin eval "function $__port_name { __port_call \"\${BASH_LINENO[0]}\" $__port_name \"\$@\"; }"
done
cd() {
    : "$(__port_command "${BASH_LINENO[0]}" cd "$@")"  # its output is no output of cd
    case ${1-} in "" | -*) ;; .) ;; ..) PWD=${PWD%/*} ;; /* | __port_*) PWD=${1%/} ;; *) PWD+=/${1%/} ;; esac
}
pwd() { printf '%s\n' "$PWD"; }
dirname() { [[ $1 == */* ]] && printf '%s\n' "${1%/*}" || printf '.\n'; }
basename() { local name=${1##*/}; printf '%s\n' "${name%"${2-}"}"; }
seq() {
    local -i from=1 by=1 to
    case $# in 1) to=$1 ;; 2) from=$1 to=$2 ;; *) from=$1 by=$2 to=$3 ;; esac
    for (( ; by > 0 ? from <= to : from >= to; from += by)); do printf '%s\n' "$from"; done
}
expr() { builtin eval "printf '%s\n' \$((${*//\\/}))"; }
cat() { if (($#)); then __port_call "${BASH_LINENO[0]}" cat "$@"; else local text; IFS= read -r -d '' text || :; printf %s "$text"; fi; }
exec() {
    (($#)) || return 0
    __port_call "${BASH_LINENO[0]}" "$@"
    builtin exit 0
}
exit() {
    if [[ $__port_of_file && ${1-0} != 0 ]]; then # the script would stop for lack of a file, which may be there
        __port_of_file=
        __port_send K "${__port_line-${BASH_LINENO[0]}}" "exit $1" __port_exit
        return 0
    fi
    __port_send X "${BASH_LINENO[0]}" "${1-0}"
    builtin exit "$@"
}
PWD=__port_v_PWD__ HOSTNAME=__port_v_HOSTNAME__ PATH=__port_v_PATH__
enable -n enable
set -T
builtin trap '[[ ${FUNCNAME-} == @(__port_*|command_not_found_handle|cd|pwd|dirname|basename|seq|expr|cat|exec|exit) ]] || __port_before "$BASH_COMMAND" "$LINENO"' DEBUG
# One line evaluates all scripts: the line of a command less this line's number is its line in its script.
source() { __port_read "${BASH_LINENO[0]}" "$1" && { shift; builtin eval "$__port_file"; }; }; .() { __port_read "${BASH_LINENO[0]}" "$1" && { shift; builtin eval "$__port_file"; }; }; __script_run() { local __port_text=$1; shift; builtin eval "$__port_text"; }; __port_read 0 "$0" && builtin eval "$__port_file"
