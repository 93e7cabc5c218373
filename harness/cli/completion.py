"""Completion of shells: verbs, their options, studies, runs; groups, options and settings after run.py.

`completion bash` prints a shell function, which calls `completion bash --line LINE`. A word with `=` is one word here
and three for bash; its function compensates. Without candidates it offers files.
"""

from __future__ import annotations

import itertools
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Sequence

from harness.cli.main import Verb, parser_of
from harness.config.catalog import load_catalog
from harness.config.doc import settings
from harness.store import commands
from harness.store.rundir import Store

REQUEST_FLAGS = ("-m", "--cfg", "--from", "--help", "--resolve", "--package", "--config-dir")
BASH = r"""_harness_completion() {
    local line="${COMP_LINE:0:COMP_POINT}" ask
    local words=($line) word="${line##*[[:space:]]}"
    case "${words[0]##*/}" in
        harness) ask=("${words[0]}") ;;
        *) [[ "${words[1]##*/}" == run.py || "${words[1]} ${words[2]}" == "-m harness" ]] || return
           ask=("${words[0]}" -m harness) ;;
    esac
    COMPREPLY=($(compgen -W "$("${ask[@]}" completion bash --line "$line" 2>/dev/null)" -- "$word"))
    if [[ ${#COMPREPLY[@]} == 1 && "${COMPREPLY[0]}" == *[=/] ]]; then compopt -o nospace 2>/dev/null; fi
    if [[ "$COMP_WORDBREAKS" == *=* && "$word" == *=* ]]; then  # bash replaces what stands behind the last "=" alone
        COMPREPLY=("${COMPREPLY[@]#"${word%"${word##*=}"}"}")
    fi
}
complete -o default -F _harness_completion harness python python3"""


def install() -> str:
    return f'eval "$({commands.verb("completion bash")})"'


def candidates(line: str, verbs: Sequence[Verb]) -> list[str]:
    words = line.split()
    typed = words.pop() if words and not line[-1:].isspace() else ""
    program = _after_program(words)
    if program is None:
        return []
    kind, rest = program
    if kind == "verb" and rest[:1] == ["run"]:
        kind, rest = "request", rest[1:]
    found = _request(rest, typed) if kind == "request" else _verb(rest, typed, verbs)
    return sorted(each for each in set(found) if each.startswith(typed))


def _after_program(words: list[str]) -> tuple[str, list[str]] | None:
    if words[:1] and words[0].rpartition("/")[2] == "harness":
        return "verb", words[1:]
    if words[1:3] == ["-m", "harness"]:
        return "verb", words[3:]
    if words[1:] and words[1].rpartition("/")[2] == "run.py":
        return "request", words[2:]
    return None


def _request(words: list[str], typed: str) -> Iterator[str]:
    key, equals, values = typed.partition("=")
    if words[-1:] == ["--from"]:
        yield from _runs(Store(_root(words)))
        return
    if key == "ckpt.load" and equals:
        yield from (f"{key}={run}" for run in _runs(Store(_root(words))))
        return
    if not equals:
        yield from REQUEST_FLAGS
        yield from (f"{name}=" for name in (*load_catalog(), *settings()))
        return
    before = values[: values.rfind(",") + 1]  # `-m sharding=optim,...`: one more value
    taken = set(before.split(","))
    declared = settings().get(key)
    options = load_catalog().get(key) or (declared.choices if declared else ())
    yield from (f"{key}={before}{each}" for each in options if each not in taken)


def _verb(words: list[str], typed: str, verbs: Sequence[Verb]) -> Iterable[str]:
    if not words:
        return [*(verb.name for verb in verbs), "run"]
    verb = next((each for each in verbs if each.name == words[0]), None)
    if verb is None:
        return []
    actions = parser_of(verb)._actions
    if typed.startswith("-"):
        return [option for action in actions for option in action.option_strings]
    store = Store(_root(words))
    found: list[str] = []
    for action in actions:
        if not action.option_strings:
            found += action.choices or _named(str(action.metavar or ""), store)
    return found


def _root(words: list[str]) -> str:
    joined = (word.partition("=")[2] for word in words if word.startswith(("--root=", "launch.root=")))
    apart = (after for word, after in itertools.pairwise(words) if word == "--root")
    return next(itertools.chain(joined, apart), "runs")


def _named(metavar: str, store: Store) -> list[str]:
    studies = list(store.studies()) if "STUDY" in metavar else []
    return [*studies, *(_runs(store) if "RUN" in metavar else [])]


def _runs(store: Store) -> list[str]:
    return ["@last", *(run.digits or run.name for run in store.runs(None))]


def completion_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash",), help=f"install it: {install()}")
    parser.add_argument("--line", metavar="LINE", help="what may follow this half-typed line, a word each")


def run_completion(arguments: Namespace) -> int:
    from harness.cli.main import VERBS

    print(BASH if arguments.line is None else "\n".join(candidates(arguments.line, VERBS)))
    return 0
