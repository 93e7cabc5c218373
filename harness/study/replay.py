"""A frozen cell again, changed: `run.py --from RUN [overrides]`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

from harness.config.compose import Cell, composed, freeze, unresolved
from harness.config.errors import BadRequest, Violation
from harness.config.overrides import Word, check_overrides
from harness.config.schema import StudyConfig
from harness.config.typed import load_config, put
from harness.config.words import in_store
from harness.store import checksums, commands, provenance
from harness.store.rundir import CONFIG, RunDir, Store
from harness.study.rendezvous import shared_root


def replay(frozen: dict[str, Any], earlier: Sequence[str], overrides: Sequence[str]) -> Cell:
    """Put overrides over a frozen configuration.

    A group's option replaces that group in full, as composing afresh would, with its effects elsewhere (engine=ddp
    implies sharding=no_shard); everything else stays. Args: frozen: plain values of `config.yaml`. earlier: the run's
    own overrides.

    Raises `BadRequest`, as `compose_cell`.
    """
    words = check_overrides(overrides)
    options = [word for word in words if word.is_group]
    values = deepcopy(frozen)
    values.pop("run", None)  # its name is its own
    if options:
        _choose(values, [text for word in options for text in word.cells])
    for word in words:
        if not word.is_group:
            put(values, word.key, OverridesParser.create().parse_override(word.cells[0]).value())
    kept = [text for text in earlier if not text.startswith("run.") and not _overridden(text, words)]
    return freeze(values, overrides, earlier=kept)


def replay_run(reference: str, overrides: Sequence[str]) -> Cell:
    """`replay` of a stored run.

    Args: reference: a path, a prefix of a signature or `@last`, under the typed or default root.

    Returns a cell of the run's present store. A run copied out of its store returns to that, or if it is gone to the
    typed or default root.

    Raises `StoreError`: no such run. `BadRequest`, as `compose_cell`; for another version's run, with a new request.
    """
    usual = shared_root(overrides)
    run = Store(usual).find(reference)
    checksums.demand(run.path, CONFIG, "overrides.txt")
    frozen = run.config()
    launch = frozen.get("launch", {})
    around, before = Store(run.path.parent.parent), Path(launch.get("root", usual))
    root = around.root if around.is_marked() else before if before.is_dir() else usual
    try:
        return replay(frozen | {"launch": launch | {"root": str(root)}}, run.overrides(), overrides)
    except BadRequest as error:
        if strange := _of_another_version(run, frozen, overrides):
            raise BadRequest(strange) from error
        raise


def _of_another_version(run: RunDir, frozen: dict[str, Any], overrides: Sequence[str]) -> list[Violation]:
    """Differences to this version's schema in a frozen file, each with a remedy; may be empty.

    No file of conf/ is at fault, and no other name in the request would help.
    """
    try:
        load_config(frozen)
    except BadRequest as error:
        kept = [text for text in run.overrides() if not _overridden(text, check_overrides(overrides))]
        words = [text for text in [*kept, *overrides] if text.partition("=")[0] not in ("study", "launch.root")]
        study, typed = run.path.parent.name, {text.partition("=")[0] for text in words}
        named = [] if study == StudyConfig.name or "study.name" in typed else [f"study.name={study}"]
        asked = commands.request(" ".join([shlex.join([*words, *named]), *in_store(run.path.parent.parent)]))
        commit = (provenance.read(run.path).get("git") or {}).get("sha", "")[:12]
        maker = f"; or run it with the code that made it, commit {commit}" if commit else ""
        fix = f"ask for it anew: {asked}{maker}"
        note = "was it edited, or made by another version of the code?"
        return [
            Violation(f"{run.path / CONFIG}: {each.subject}", f"{each.problem}: {note}", fix=fix)
            for each in error.violations
        ]
    return []


def _choose(values: dict[str, Any], options: Sequence[str]) -> None:
    before, after = unresolved(composed(())), unresolved(composed(options))
    chosen = {text.partition("=")[0] for text in options}
    values |= {group: each for group, each in after.items() if group in chosen or each != before[group]}


def _overridden(text: str, words: Sequence[Word]) -> bool:
    key = text.partition("=")[0]
    return any(key == word.key or (word.is_group and key.startswith(f"{word.key}.")) for word in words)
