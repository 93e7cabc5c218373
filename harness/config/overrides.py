"""Check of override words before Hydra: every typo, wrong type and forbidden sign at once.

Hydra stops at the first mistake, takes `+new=1` silently and advises to append a misspelt key with `+`. Each override
is parsed with Hydra's own grammar and checked against the typed root and `conf/`.

Of Hydra's own settings, typed or in option files: any sweeper and launcher of Hydra can carry out a set of cells (-m).
Where runs lie and what is logged is Hydra's to say only for these; a setting that would have no effect is refused
wherever it stands.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, get_origin

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep, Override, QuotedString
from hydra.errors import HydraException

from harness.config.catalog import NULLABLE, STUDY_FILE, OptionFile, files_of, load_catalog, study_path
from harness.config.doc import settings, tables
from harness.config.errors import BadRequest, Violation
from harness.config.hints import explain_key, explain_option, nearest
from harness.config.typed import MISSING, put, wrong_parts
from harness.config.words import quote
from harness.store import commands
from harness.store.screen import shorten

SHOWN = 60

MAX_SWEEP = 100_000


@dataclass(frozen=True)
class Word:
    text: str
    key: str
    values: tuple[str, ...]
    is_group: bool

    @property
    def cells(self) -> tuple[str, ...]:
        return tuple(f"{self.key}={value}" for value in self.values)


def check_overrides(overrides: Sequence[str], *, multirun: bool = False) -> list[Word]:
    """Parse and check every override; Hydra's own settings are checked, and are none of the words.

    Args: multirun: comma lists and ranges make axes.

    Raises `BadRequest` with every violation.
    """
    return read_overrides(overrides, multirun=multirun)[0]


def read_overrides(overrides: Sequence[str], *, multirun: bool = False) -> tuple[list[Word], Asked]:
    """The words of `check_overrides`, and what the request and its option files ask of Hydra."""
    violations: list[Violation] = []
    parsed: dict[str, Override] = {}
    for text in overrides:
        result = _parsed(text)
        if isinstance(result, Override):
            parsed[text] = result
        else:
            violations.append(result)
    asked = _asked_of_hydra(parsed, multirun)
    words: list[Word] = []
    for text in overrides:
        if text not in parsed or is_hydra(str(parsed[text].key_or_group)):
            continue
        found = _refused(text, parsed[text], asked) or _understand(text, parsed[text])
        if isinstance(found, Word):
            words.append(found)
        else:
            violations.extend(found)
    violations.extend(_duplicates(words))
    violations.extend(asked.violations())
    if violations:
        raise BadRequest(violations)
    return words, asked


def _parsed(text: str) -> Override | Violation:
    if any("\ud800" <= character <= "\udfff" for character in text):
        return Violation(repr(text), "holds bytes that are not UTF-8", fix="a name in UTF-8")
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException:
        return _malformed(text)
    except ValueError:  # Python reads no whole number of more than 4,300 digits
        return Violation(shorten(text, SHOWN), "holds a number of more digits than are read", fix="fewer digits")


def _asked_of_hydra(parsed: Mapping[str, Override], multirun: bool) -> Asked:
    typed: list[HydraSetting] = []
    in_files: list[HydraSetting] = []
    for text, override in parsed.items():
        key = str(override.key_or_group)
        if is_hydra(key):
            typed.append(hydra_setting(text, key, override.value()))
        elif key in load_catalog():
            names = [str(parsed) for parsed, _ in _values(override, load_catalog()[key])]  # a study's may be a path
            in_files += [replace(s, swept=len(names) > 1) for name in names for s in in_option(key, name)]
    return Asked((*typed, *in_files), multirun)


def _refused(text: str, override: Override, asked: Asked) -> list[Violation]:
    key = str(override.key_or_group)
    if text.startswith(("+", "~")):
        return [appending(text)]
    if override.package is not None and key:
        return [Violation(text, "a group's place is fixed", fix=f"{key}={override.value()}")]
    if override.is_interval_sweep() and not asked.draws:
        fix = f"{key}=range(START,STOP,STEP) or a list of values; or a sweeper that draws them, hydra/sweeper=optuna"
        return [Violation(text, "has no values to go through", fix=fix)]
    if override.is_range_sweep() and (wrong := _endless(text, override.value())):
        return [wrong]
    if override.is_sweep_override() and not asked.multirun:
        takes_list = key in settings() and get_origin(settings()[key].type) is list
        fix = commands.request(f"-m {shlex.quote(text)}") + (f", or {key}=[...] for a list" if takes_list else "")
        return [Violation(text, "names several values, which makes several cells", fix=fix)]
    return []


def _endless(text: str, swept: Any) -> Violation | None:
    fix = f"{text.partition('=')[0]}=range(START,STOP,STEP)"
    ends = (swept.start, swept.stop, swept.step)
    if not swept.step or any(isinstance(end, float) and not math.isfinite(end) for end in ends):
        return Violation(text, "never comes to its end", fix=fix)
    count = sum(1 for _ in islice(iter(swept.range()), MAX_SWEEP + 1))
    too_many = Violation(text, f"gives more than {MAX_SWEEP:,} values", f"1 to {MAX_SWEEP:,}")
    return too_many if count > MAX_SWEEP else None


def _understand(text: str, override: Override) -> Word | list[Violation]:
    key = str(override.key_or_group)
    if not key:
        return [Violation(text, "names no group or setting", fix="write group=option or group.key=value")]
    options = load_catalog().get(key)
    if options is None and not (key in settings() or any(key.startswith(f"{path}.") for path in tables())):
        return [explain_key(key)]
    values = list(_values(override, options or ()))
    wrong = [v for each in values for v in (_type_violations if options is None else _option_violations)(key, each[0])]
    if options is not None and not values:
        return [Violation(text, "matches no option", ", ".join(options))]
    if not 0 < len(values) <= MAX_SWEEP:
        return [Violation(text, f"gives {len(values):,} values", f"1 to {MAX_SWEEP:,}")]
    return wrong or Word(text, key, tuple(each for _, each in values), is_group=options is not None)


def _option_violations(group: str, option: Any) -> list[Violation]:
    if option is None and group in NULLABLE:
        return []
    if group == "study" and (file := study_path(str(option))) is not None:
        return [] if file.is_file() else [_no_study_file(str(option), file)]
    if isinstance(option, dict):
        inside = ", ".join(f"{group}.{key}={value}" for key, value in option.items())
        return [Violation(f"{group}={{...}}", "a group is chosen by name; its settings are set one by one", fix=inside)]
    if str(option) not in load_catalog()[group]:
        return [explain_option(group, option)]
    return [*_file_faults(group, str(option))]


def _file_faults(group: str, option: str) -> Iterator[Violation]:
    """Faults of the files that an option is made of; Hydra would not name the file."""
    for file in files_of(group, option):
        if file.problem and os.path.lexists(file.path):
            yield Violation(f"{group}={option}", file.problem, fix="a table of settings, written out")
        for each in wrong_parts({key: value for key, value in file.table.items() if not is_hydra(str(key))}):
            yield replace(each, subject=f"{file.path}: {each.subject}")


def _no_study_file(option: str, file: Path) -> Violation:
    valid = f"a path, or {', '.join(load_catalog()['study'])}"
    try:
        beside = sorted(each.name for each in file.parent.iterdir() if each.suffix in (".yaml", ".yml"))
    except OSError:
        beside = []
    meant = [option[: -len(file.name)] + name for name in difflib.get_close_matches(file.name, beside)]
    fix = f"did you mean study={' or study='.join(meant)}?" if meant else "the path of a study file"
    return Violation(f"study={option}", f"there is no file {file}", valid, fix)


def _values(override: Override, names: Sequence[str]) -> Iterator[tuple[Any, str]]:
    """Values of a word as Hydra reads them, each with its text."""
    if not override.is_sweep_override():
        yield override.value(), str(override.input_line).partition("=")[2]
        return
    swept: Any = override.value()
    if isinstance(swept, IntervalSweep):
        yield from ((end, str(end)) for end in (swept.start, swept.end))
    elif isinstance(swept, Glob):
        yield from ((name, name) for name in swept.filter(list(names)))
    else:
        for parsed, text in zip(override.sweep_iterator(), override.sweep_string_iterator(), strict=True):
            yield parsed.text if isinstance(parsed, QuotedString) else parsed, str(text)


def _type_violations(key: str, value: Any) -> Iterator[Violation]:
    if value == MISSING:
        problem = "is not a value: it is OmegaConf's mark for a missing one"
        yield Violation(f"{key}={MISSING}", problem, fix="give a value")
        return
    table: dict[str, Any] = {}
    put(table, key, value)
    yield from wrong_parts(table)


def hydra_words(overrides: Sequence[str]) -> list[str]:
    """Overrides for Hydra, which refuses `GROUP=null`, and knows a study by another name (`study.cells.register`)."""
    found = []
    for text in overrides:
        key, _, value = text.partition("=")
        if not (key in NULLABLE and value.strip().lower() == "null"):
            found.append(f"study={STUDY_FILE}" if key == "study" and study_path(value) is not None else text)
    return found


def typed_value(overrides: Sequence[str], key: str, default: Any) -> Any:
    values = [text for text in overrides if text.startswith(f"{key}=")]
    return OverridesParser.create().parse_override(values[-1]).value() if values else default


def _duplicates(words: list[Word]) -> Iterator[Violation]:
    by_key: dict[str, list[str]] = defaultdict(list)
    for word in words:
        by_key[word.key].append(word.text)
    for key, texts in by_key.items():
        if len(texts) > 1:
            problem = f"is given {len(texts)} times: {', '.join(texts)}"
            yield Violation(key, problem, fix=f"keep one, such as {texts[-1]}")


def _malformed(text: str) -> Violation:
    key, sign, value = text.partition("=")
    if not sign:
        holders = [group for group, options in load_catalog().items() if text in options]
        names = nearest(text, [*load_catalog(), *settings()])
        meant = [f"{group}={text}" for group in holders[:3]] or [f"{name}=VALUE" for name in names]
        fix = f"did you mean {' or '.join(meant)}?" if meant else "write group=option or group.key=value"
        return Violation(repr(text), "is not key=value", fix=fix)
    if text.startswith("-"):  # argparse takes a flag with a space in it for a word
        return no_flag(text)
    try:
        OverridesParser.create().parse_override(f"{key.lstrip('+~')}=1")
    except HydraException:
        return replace(explain_key(key), subject=repr(key))
    if len(apart := re.split(r"[,;]?\s+(?=[\w.]+=)", text)) > 1:
        fix = " ".join(shlex.quote(each) for each in apart)
        return Violation(text, "is several settings in one word; write each as a word of its own", fix=fix)
    if value.startswith("~"):
        problem = "cannot be read: a shell puts your home in place of ~ at the start of a word alone"
        return Violation(text, problem, fix=f'{key}="$HOME{value[1:]}"')
    problem = "cannot be read: quotes, braces, commas, line breaks and letters beyond ASCII need quoting"
    return Violation(text, problem, fix=shlex.quote(f"{key}={quote(value)}"))


def no_flag(text: str) -> Violation:
    return Violation(text, "is no flag; settings have no dashes", fix=shlex.quote(text.lstrip("-")))


def forbid_appending(overrides: Sequence[str]) -> None:
    """Raises `BadRequest` for `+key`, `++key` and `~key`: the set of settings is fixed, and Hydra would accept them."""
    found = [appending(o) for o in overrides if o.startswith(("+", "~"))]
    if found:
        raise BadRequest(found)


def appending(override: str) -> Violation:
    bare = override.lstrip("+~")
    key = bare.partition("=")[0]
    if override.startswith("~"):
        problem = "groups and settings cannot be removed, only chosen"
        return Violation(override, problem, fix=f"{key}=OPTION, or leave it out")
    known = key in settings() or key in load_catalog()
    fix = f"{bare} (without the sign)" if known else explain_key(key).fix
    return Violation(override, "settings cannot be added: the schema names them all", fix=fix)


SWEEPER, LAUNCHER = "harness", "basic"
"""The sweeper and launcher where none is named: one plan for all cells, carried out where `cluster` says."""
_RUNS = "launch.root=DIR, the folder of all runs; study.name=NAME makes the folder in it"
INSTEAD = {"run": _RUNS, "sweep": _RUNS, "output_subdir": _RUNS}
ALONE = "name it in words, or in an option that all cells have"
OF_JOBS = ("sweep", "job_logging", "hydra_logging")
"""Settings of jobs that Hydra starts: honoured beside a sweeper or launcher of Hydra's."""


@dataclass(frozen=True)
class HydraSetting:
    """subject: the word, or file and place. key: path under `hydra`, such as `launcher.n_jobs`; empty for all of it.
    swept: it stands in one of several options, which Hydra composes for each job after it chose the launcher."""

    subject: str
    key: str
    value: Any = None
    swept: bool = False

    @property
    def part(self) -> str:
        return self.key.partition(".")[0]


@dataclass(frozen=True)
class Asked:
    """Settings that a request has for Hydra. typed_multirun: -m was typed."""

    settings: tuple[HydraSetting, ...]
    typed_multirun: bool

    def _chosen(self, part: str, default: str) -> str:
        names = [str(each.value) for each in self.settings if each.key == part and isinstance(each.value, str)]
        return names[0] if names else default  # typed ones come first, as Hydra has it

    @cached_property
    def sweeper(self) -> str:
        return self._chosen("sweeper", SWEEPER)

    @cached_property
    def launcher(self) -> str:
        return self._chosen("launcher", LAUNCHER)

    @cached_property
    def multirun(self) -> bool:
        return self.typed_multirun or self._chosen("mode", "").upper() == "MULTIRUN"

    @property
    def by_hydra(self) -> bool:
        """True if Hydra's sweeper or launcher starts the jobs, each of which carries out one cell."""
        return self.sweeper != SWEEPER or self.launcher != LAUNCHER

    @property
    def draws(self) -> bool:
        """True if the sweeper chooses values by what earlier jobs returned."""
        return self.sweeper not in (SWEEPER, "basic")

    def violations(self) -> Iterator[Violation]:
        for each in self.settings:
            if each.subject.startswith(("+", "~")) and not each.key.startswith(("sweeper.", "launcher.")):
                yield _refusal(each.subject, each.key)
            elif each.part in ("sweeper", "launcher"):
                if each.swept:
                    yield Violation(each.subject, "stands in one of several options, and a set has one", fix=ALONE)
                elif not self.multirun:
                    instead = "" if each.part == "sweeper" else "; cluster=slurm for one cell"
                    problem = "is for a set of cells, where its option is chosen beside -m"
                    yield Violation(each.subject, problem, fix=f"-m{instead}")
            elif each.key == "mode":
                if str(each.value).upper() != "MULTIRUN":
                    yield Violation(each.subject, "one cell is what is asked for without -m", "MULTIRUN")
            elif each.part not in OF_JOBS or not self.by_hydra:
                yield _refusal(each.subject, each.key)


def is_hydra(key: str) -> bool:
    return re.split(r"[./]", key.removeprefix("_global_.").lstrip("/"), maxsplit=1)[0] == "hydra"


def hydra_setting(subject: str, key: str, value: Any) -> HydraSetting:
    """Args: key: as written, such as `/hydra/launcher` or `hydra.launcher.n_jobs`."""
    parts = re.split(r"[./]", key.removeprefix("_global_.").lstrip("/"))
    return HydraSetting(subject, ".".join(parts[1:]), value)


def _refusal(subject: str, key: str) -> Violation:
    problem = "Hydra's own settings are fixed but for its sweepers and launchers: the harness decides where runs lie"
    return Violation(subject, problem, fix=INSTEAD.get(key.partition(".")[0], "leave it out"))


def in_option(group: str, name: str) -> Iterator[HydraSetting]:
    for file in files_of(group, name):
        yield from _in_file(file)


def _in_file(file: OptionFile) -> Iterator[HydraSetting]:
    if is_hydra(file.package):
        yield hydra_setting(f"{file.path}: @package {file.package}", file.package, file.values)
    for key in filter(is_hydra, map(str, file.values)):
        inside = file.values[key]
        pairs = [(f"{key}.{each}", inside[each]) for each in inside] if isinstance(inside, dict) else [(key, inside)]
        yield from (hydra_setting(f"{file.path}: {path}", path, value) for path, value in pairs)
    for line in file.lines:
        if is_hydra(line.path) or is_hydra(line.package):
            where = line.group if is_hydra(line.path) else line.package
            names = line.names or (line.path.rpartition("/")[2],)
            chosen = f": {', '.join(line.names)}" if line.names else ""
            value = names[0] if len(names) == 1 else [*names]
            yield hydra_setting(f"{file.path}: defaults: {line.words}{chosen}", where, value)
