"""Check of override words before Hydra: every typo and forbidden sign at once.

Hydra stops at the first mistake, takes `+new=1` silently and advises to append a misspelt key with `+`. Each override
is parsed with Hydra's own grammar, and its key and option are looked up. Values are typed when a cell is frozen
(`harness.config.typed`).
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, get_origin

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep, Override, QuotedString
from hydra.errors import HydraException

from harness.config.catalog import NULLABLE, STUDIES, STUDY_FILE, load_catalog, read_option, study_of
from harness.config.doc import settings, tables
from harness.config.errors import BadRequest, Violation
from harness.config.hints import explain_key, explain_option, nearest
from harness.config.hydra_settings import is_hydra, refused_of_hydra
from harness.config.typed import MISSING
from harness.config.words import quote
from harness.store import commands
from harness.store.errors import StoreError
from harness.store.screen import shorten

SHOWN = 60

MAX_SWEEP = 100_000


@dataclass(frozen=True)
class Word:
    text: str
    key: str
    values: tuple[str, ...]
    parsed: tuple[Any, ...]
    """Values as Hydra reads them."""
    is_group: bool

    @property
    def cells(self) -> tuple[str, ...]:
        return tuple(f"{self.key}={value}" for value in self.values)


def check_overrides(overrides: Sequence[str], *, multirun: bool = False, draws: bool = False) -> list[Word]:
    """Parse and check every override; Hydra's own settings are checked, and are none of the words.

    Args: multirun: comma lists and ranges make axes. draws: a sweeper may choose values from intervals.

    Raises `BadRequest` with every violation.
    """
    violations: list[Violation] = []
    words: list[Word] = []
    for text in overrides:
        parsed = _parsed(text)
        if isinstance(parsed, Violation):
            violations.append(parsed)
        elif is_hydra(str(parsed.key_or_group)):
            violations += refused_of_hydra(text, str(parsed.key_or_group), parsed.value(), multirun)
        elif found := _refused(text, parsed, multirun, draws):
            violations.append(found)
        elif isinstance(understood := _understand(text, parsed), Word):
            words.append(understood)
        else:
            violations += understood
    for key, count in Counter(word.key for word in words).items():
        if count > 1:
            texts = [word.text for word in words if word.key == key]
            problem = f"is given {count} times: {', '.join(texts)}"
            violations.append(Violation(key, problem, fix=f"keep one, such as {texts[-1]}"))
    if violations:
        raise BadRequest(violations)
    return words


def _parsed(text: str) -> Override | Violation:
    if any("\ud800" <= character <= "\udfff" for character in text):
        return Violation(repr(text), "holds bytes that are not UTF-8", fix="a name in UTF-8")
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException:
        return _malformed(text)
    except ValueError:  # Python reads no whole number of more than 4,300 digits
        return Violation(shorten(text, SHOWN), "holds a number of more digits than are read", fix="fewer digits")


def _refused(text: str, override: Override, multirun: bool, draws: bool) -> Violation | None:
    key = str(override.key_or_group)
    if text.startswith(("+", "~")):
        return appending(text)
    if override.package is not None and key:
        return Violation(text, "a group's place is fixed", fix=f"{key}={override.value()}")
    if override.is_interval_sweep() and not draws:
        fix = f"{key}=range(START,STOP,STEP) or a list of values; or a sweeper that draws them, hydra/sweeper=optuna"
        return Violation(text, "has no values to go through", fix=fix)
    if override.is_range_sweep() and (wrong := _endless(text, override.value())):
        return wrong
    if override.is_sweep_override() and not multirun:
        takes_list = key in settings() and get_origin(settings()[key].type) is list
        fix = commands.request(f"-m {shlex.quote(text)}") + (f", or {key}=[...] for a list" if takes_list else "")
        return Violation(text, "names several values, which makes several cells", fix=fix)
    return None


def _endless(text: str, swept: Any) -> Violation | None:
    if not swept.step or not all(math.isfinite(end) for end in (swept.start, swept.stop, swept.step)):
        return Violation(text, "never comes to its end", fix=f"{text.partition('=')[0]}=range(START,STOP,STEP)")
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
    if options is not None and not values:
        return [Violation(text, "matches no option", ", ".join(options))]
    if not 0 < len(values) <= MAX_SWEEP:
        return [Violation(text, f"gives {len(values):,} values", f"1 to {MAX_SWEEP:,}")]
    wrong = [each for value, _ in values if (each := _option_fault(key, value))] if options is not None else []
    if any(value == MISSING for value, _ in values):
        problem = "is not a value: it is OmegaConf's mark for a missing one"
        wrong = [Violation(f"{key}={MISSING}", problem, fix="give a value")]
    parsed, texts = zip(*values, strict=True)
    return wrong or Word(text, key, texts, parsed, is_group=options is not None)


def _option_fault(group: str, option: Any) -> Violation | None:
    if option is None and group in NULLABLE:
        return None
    if str(option) not in load_catalog()[group]:
        return explain_option(group, option)
    try:
        read_option(group, str(option))
    except StoreError as error:  # Hydra would hang, or not name the file
        return Violation(f"{group}={option}", str(error), fix="a table of settings, written out")
    return None


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


def hydra_words(overrides: Sequence[str]) -> list[str]:
    """Overrides for Hydra, which refuses `GROUP=null`, and knows a study by another name (`study.cells.register`)."""
    found = []
    for text in overrides:
        key, _, value = text.partition("=")
        if not (key in NULLABLE and value.strip().lower() == "null"):
            found.append(f"{STUDIES}={STUDY_FILE}" if study_of(text) else text)
    return found


def typed_value(overrides: Sequence[str], key: str, default: Any) -> Any:
    values = [text for text in overrides if text.startswith(f"{key}=")]
    return OverridesParser.create().parse_override(values[-1]).value() if values else default


def _malformed(text: str) -> Violation:
    key, sign, value = text.partition("=")
    if not sign:
        holders = [group for group, options in load_catalog().items() if text in options]
        names = nearest(text, [*load_catalog(), *settings()])
        meant = [f"{group}={text}" for group in holders[:3]] or [f"{name}=VALUE" for name in names]
        fix = f"did you mean {' or '.join(meant)}?" if meant else "write group=option or group.key=value"
        return Violation(repr(text), "is not key=value", fix=fix)
    try:
        OverridesParser.create().parse_override(f"{key.lstrip('+~')}=1")
    except HydraException:
        return replace(explain_key(key), subject=repr(key))
    if value.startswith("~"):
        problem = "cannot be read: a shell puts your home in place of ~ at the start of a word alone"
        return Violation(text, problem, fix=f'{key}="$HOME{value[1:]}"')
    problem = "cannot be read: quotes, braces, commas, line breaks and letters beyond ASCII need quoting"
    return Violation(text, problem, fix=shlex.quote(f"{key}={quote(value)}"))


def no_flag(text: str) -> Violation:
    return Violation(text, "is no flag; settings have no dashes", fix=shlex.quote(text.lstrip("-")))


def appending(override: str) -> Violation:
    bare = override.lstrip("+~")
    key = bare.partition("=")[0]
    if override.startswith("~"):
        problem = "groups and settings cannot be removed, only chosen"
        return Violation(override, problem, fix=f"{key}=OPTION, or leave it out")
    known = key in settings() or key in load_catalog()
    fix = f"{bare} (without the sign)" if known else explain_key(key).fix
    return Violation(override, "settings cannot be added: the schema names them all", fix=fix)
