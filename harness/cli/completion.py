"""Completion of bash: verbs, and names of studies and runs.

`completion bash` prints a shell function, which calls `completion bash --line LINE`; else files are offered.
"""

from __future__ import annotations

import itertools
from argparse import ArgumentParser, Namespace

from harness.cli.main import VERBS, parser_of
from harness.store import commands
from harness.store.rundir import Store

BASH = r"""_harness_completion() {
    local line="${COMP_LINE:0:COMP_POINT}" ask
    local words=($line) word="${line##*[[:space:]]}"
    case "${words[0]##*/}" in
        harness) ask=("${words[0]}") ;;
        *) [[ "${words[1]##*/}" == run.py || "${words[1]} ${words[2]}" == "-m harness" ]] || return
           ask=("${words[0]}" -m harness) ;;
    esac
    COMPREPLY=($(compgen -W "$("${ask[@]}" completion bash --line "$line" 2>/dev/null)" -- "$word"))
}
complete -o default -F _harness_completion harness python python3"""


def install() -> str:
    return f'eval "$({commands.verb("completion bash")})"'


def candidates(line: str) -> list[str]:
    words = line.split()
    typed = words.pop() if words and not line[-1:].isspace() else ""
    rest = words[3 if words[1:3] == ["-m", "harness"] else 1 :]
    if words[-1:] == ["--from"]:
        found = _named("RUN", words)
    elif not rest:
        found = [*(verb.name for verb in VERBS), "run"]
    else:
        verb = next((each for each in VERBS if each.name == rest[0]), None)
        actions = parser_of(verb)._actions if verb is not None else []
        asked = [action for action in actions if not action.option_strings]
        found = [name for action in asked for name in action.choices or _named(str(action.metavar or ""), words)]
    return sorted(each for each in set(found) if each.startswith(typed))


def _named(metavar: str, words: list[str]) -> list[str]:
    joined = (word.partition("=")[2] for word in words if word.startswith(("--root=", "launch.root=")))
    apart = (after for word, after in itertools.pairwise(words) if word == "--root")
    store = Store(next(itertools.chain(joined, apart), "runs"))
    studies = list(store.studies()) if "STUDY" in metavar else []
    runs = ["@last", *(run.digits or run.name for run in store.runs(None))] if "RUN" in metavar else []
    return [*studies, *runs]


def completion_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash",), help=f"install it: {install()}")
    parser.add_argument("--line", metavar="LINE", help="what may follow this half-typed line, a word each")


def run_completion(arguments: Namespace) -> int:
    print(BASH if arguments.line is None else "\n".join(candidates(arguments.line)))
    return 0
