"""Hydra's own settings, typed or in option files.

Any sweeper and launcher of Hydra can carry out a set of cells (-m). Where runs lie is Hydra's to say only for these; a
setting that would have no effect is refused wherever it stands: typed ones by their words, those of option files by
what Hydra composed of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from harness.config.catalog import ROOT
from harness.config.doc import as_typed
from harness.config.errors import BadRequest, Violation, refuse
from harness.store import commands
from harness.store.reading_yaml import read_yaml
from harness.store.rundir import flatten
from harness.store.shapes import Maybe

_RUNS = "launch.root=DIR, the folder of all runs; study.name=NAME makes the folder in it"
INSTEAD = {"run": _RUNS, "sweep": _RUNS, "output_subdir": _RUNS}
OF_JOBS = ("sweep", "job_logging", "hydra_logging")
"""Settings of jobs that Hydra starts: honoured beside a sweeper or launcher of Hydra's."""
CARRIERS = ("sweeper", "launcher")


def is_hydra(key: str) -> bool:
    return re.split(r"[./]", key.removeprefix("_global_.").lstrip("/"), maxsplit=1)[0] == "hydra"


def refused_of_hydra(text: str, key: str, value: Any, multirun: bool) -> Iterator[Violation]:
    """Violation of a typed setting. Settings of a set's jobs are left to `check_hydra`, which knows the sweeper."""
    part, _, inside = key.removeprefix("_global_.").lstrip("/").replace("/", ".").partition(".")[2].partition(".")
    signed = text.startswith(("+", "~"))
    if part == "mode" and not signed:
        if str(value).upper() != "MULTIRUN":
            yield Violation(text, "one cell is what is asked for without -m", "MULTIRUN")
    elif part in CARRIERS and (inside or not signed):
        if not multirun:
            yield _of_a_set(text, part)
    elif part not in OF_JOBS or signed or not multirun:
        yield _fixed(text, part)


def check_hydra(hydra: Any, *, multirun: bool) -> None:
    """Raises `BadRequest`: a composed `hydra` node has settings without effect."""
    node, carriers = _plain(hydra), {part: hydra[part].get("_target_", "").rpartition(".")[2] for part in CARRIERS}
    by_hydra = carriers != {"sweeper": "StudySweeper", "launcher": "BasicLauncher"}
    found = []
    if not multirun and (by_hydra or node["sweeper"].get("params")):
        part = "sweeper" if carriers["launcher"] == "BasicLauncher" else "launcher"
        found.append(_of_a_set(f"hydra/{part}={hydra.runtime.choices[f'hydra/{part}']}, set by an option", part))
    found += [
        _fixed(f"hydra/{part}={choice}", part)
        for part in OF_JOBS[1:]
        if (choice := hydra.runtime.choices[f"hydra/{part}"]) != "none" and not (multirun and by_hydra)
    ]
    usual = flatten((read_yaml(ROOT / "conf" / "config.yaml", Maybe(dict)) or {})["hydra"])
    present = flatten(node)
    for key in usual.keys() & present.keys():
        part = key.partition(".")[0]
        if present[key] != usual[key] and not (part in OF_JOBS and multirun and by_hydra):
            found.append(_fixed(f"hydra.{key}={as_typed(present[key])}", part))
    if found:
        raise BadRequest(found)


def demand_training(sweeper: str) -> None:
    """Raises `BadRequest`: a sweeper draws values by what was trained, and a dry run trains nothing."""
    if sweeper not in ("harness", "basic"):
        problem = f"trains nothing, and hydra/sweeper={sweeper} draws values by what was trained"
        fix = f"leave one out; {commands.request('--cfg hydra ...')} shows it"
        raise refuse("launch.dry_run=true", problem, fix=fix)


def same_jobs(master: DictConfig, cell: DictConfig) -> None:
    """Raises `BadRequest`: a cell's options ask for other jobs than Hydra composed for the set."""
    asked, others = _plain(master.hydra), _plain(cell.hydra)
    for part in asked:
        if asked[part] != others[part]:
            choice = cell.hydra.runtime.choices.get(f"hydra/{part}")
            subject = f"hydra/{part}={choice}" if choice else f"hydra.{part}={as_typed(others[part])}"
            problem = "stands in one of several options, and a set has one"
            raise refuse(
                f"{subject}, set by an option", problem, fix="name it in words, or in an option that all cells have"
            )


def _plain(hydra: Any) -> dict[str, Any]:
    """Values of a `hydra` node on which jobs depend, with references as written."""
    parts = OmegaConf.masked_copy(hydra, ["run", "sweep", "output_subdir", *CARRIERS])
    return cast(dict[str, Any], OmegaConf.to_container(parts, resolve=False))


def _of_a_set(subject: str, part: str) -> Violation:
    instead = "" if part == "sweeper" else "; cluster=slurm for one cell"
    return Violation(subject, "is for a set of cells, where its option is chosen beside -m", fix=f"-m{instead}")


def _fixed(subject: str, part: str) -> Violation:
    problem = "Hydra's own settings are fixed but for its sweepers and launchers: the harness decides where runs lie"
    return Violation(subject, problem, fix=INSTEAD.get(part, "leave it out"))
