"""A frozen cell again, changed: `run.py --from RUN [overrides]`."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.config.compose import Cell, composed, freeze, plain
from harness.config.errors import BadRequest
from harness.config.overrides import check_overrides
from harness.config.typed import load_config, put
from harness.store import checksums
from harness.store.rundir import CONFIG, Store
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
        chosen = {word.key for word in options}
        texts = [text for word in options for text in word.cells]
        before, after = (plain(composed(each), resolve=False) for each in ((), texts))
        values |= {group: each for group, each in after.items() if group in chosen or each != before[group]}
    for word in words:
        if not word.is_group:
            put(values, word.key, word.parsed[0])
    keys = {word.key for word in words} | {"run"}
    inside = ("run.", *(f"{word.key}." for word in options))
    kept = [text for text in earlier if text.partition("=")[0] not in keys and not text.startswith(inside)]
    return freeze(values, overrides, earlier=kept)


def replay_run(reference: str, overrides: Sequence[str]) -> Cell:
    """`replay` of a stored run.

    Args: reference: a path, a prefix of a signature or `@last`, under the typed or default root.

    Returns a cell of the run's present store. A run copied out of its store returns to that, or if it is gone to the
    typed or default root.

    Raises `StoreError`: no such run. `BadRequest`, as `compose_cell`; for another version's run, naming its file.
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
        try:
            load_config(frozen)
        except BadRequest as strange:  # of another version, or edited: no other name in the request would help
            file, fix = run.path / CONFIG, f"ask for it anew, with the words of {run.path / 'overrides.txt'}"
            named = [replace(each, subject=f"{file}: {each.subject}", fix=fix) for each in strange.violations]
            raise BadRequest(named) from error
        raise
