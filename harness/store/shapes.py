"""Shapes of a run's files: required keys, and kinds of their values.

A shape is a type, a tuple of types, `Each` (a list or table of equals), `Maybe` (or null), or a table of shapes by key;
a key that ends with `?` may be missing. Other keys are free: a newer version may have written them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Each:
    container: type
    of: Shape
    count: int | None = None
    """Number of entries; None: any."""


@dataclass(frozen=True)
class Maybe:
    of: Shape


Shape = type | tuple[type, ...] | Each | Maybe | Mapping[str, Any]

NUMBER = (int, float)
_NAMES = {
    dict: "a table",
    list: "a list",
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
}


def fault(value: Any, shape: Shape, at: str = "") -> str:
    """Why `value` does not have this shape, in a sentence; empty if it does."""
    if isinstance(shape, Maybe):
        return "" if value is None else fault(value, shape.of, at)
    if isinstance(shape, Each):
        return _each_fault(value, shape, at)
    if isinstance(shape, Mapping):
        return _kind_fault(value, dict, at) or _first(_key_fault(value, key, of, at) for key, of in shape.items())
    return _kind_fault(value, shape, at)


def _each_fault(value: Any, shape: Each, at: str) -> str:
    if wrong := _kind_fault(value, shape.container, at):
        return wrong
    if shape.count not in (None, len(value)):
        return f"{at or 'it'} has {len(value)} values, not {shape.count}"
    return _first(fault(item, shape.of, _inner(at, key)) for key, item in _items(value))


def _items(value: Any) -> Any:
    return value.items() if isinstance(value, dict) else enumerate(value)


def _first(faults: Any) -> str:
    return next((each for each in faults if each), "")


def _inner(at: str, key: object) -> str:
    return f"{at}.{key}" if at else str(key)


def _key_fault(table: Mapping[str, Any], key: str, shape: Shape, at: str) -> str:
    name = key.removesuffix("?")
    if name in table:
        return fault(table[name], shape, _inner(at, name))
    return "" if name != key else f"{_inner(at, name)} is missing"


def _kind_fault(value: Any, kinds: type | tuple[type, ...], at: str) -> str:
    wanted = kinds if isinstance(kinds, tuple) else (kinds,)
    if isinstance(value, wanted) and not (isinstance(value, bool) and bool not in wanted):
        return ""
    found = "null" if value is None else _NAMES.get(type(value), type(value).__name__)
    return f"{at or 'it'} is {found}, not {_NAMES[wanted[-1]]}"


STATUS: Shape = {
    "state": str,
    "reason": str,
    "attempt": int,
    "keeper": str,
    "host?": str,
    "pid?": int,
    "job?": str,
    "submission?": str,
    "index?": int,
    "mirror?": str,
    "steps?": int,
    "checksums?": str,
    "updated?": str,
}

LISTED: Shape = {"version": int, "attempts": int, "files": Each(dict, {"bytes": int, "xxh3": str})}

CONFIG: Shape = {
    **dict.fromkeys(("fault?", "numerics?", "data?", "optimizer?", "ckpt?", "cluster?", "launch?", "wandb?"), dict),
    "model?": {"name?": str},
    "engine?": {"name?": str},
    "sharding?": {"strategy?": str},
    "dtype?": {"name?": str},
    "mesh?": {"world_size?": int},
    "study?": {"name?": str},
    "train?": {"steps?": int, "replicate?": int},
    "measure?": {
        "capture_steps?": Maybe(Each(list, int)),
        "update_steps?": Maybe(Each(list, int)),
        "warmup_steps?": int,
    },
    "notes?": str,
}
"""No key is required: versions differ in their settings (`RunDir.setting` reports missing ones)."""

TIMED: Shape = {
    **dict.fromkeys(("data", "optimizer", "numerics", "nccl_ub", "sharp"), dict),
    "model": {"name": str},
    "engine": {"name": str},
    "sharding": {"strategy": str, "outer": str},
    "dtype": {"name": str},
    "mesh": {"world_size": int, "dp_outer": int},
    "train": {"steps": int, "replicate": int},
    "measure": {"mode": str, "warmup_steps": int},
    "cluster": {"device": str},
}

_OWN: Shape = {"kind": str, "name": str, "root": str, "files": Each(list, str), "digest": str}

PROVENANCE: Shape = {
    "sources_digest?": str,
    "versions?": Each(dict, str),
    "environment?": Each(dict, str),
    "hosts?": Each(list, str),
    "git?": Maybe({"sha": str, "dirty": bool}),
    "own?": Each(list, _OWN),
}

_ASKED: Shape = {"requested": str, "effective": str}

_RESTORED: Shape = {"step": int, "wrong": Each(list, str)}

_STRUCTURE: Shape = {
    "aliases": Each(list, Each(list, str, count=2)),
    "untied": Each(list, str),
    "elsewhere": Each(list, str),
}

_COLLECTIVE: Shape = {"bucket": Maybe(str), "count": int, "kind": str, "bytes": int}

SUMMARY: Shape = {
    "accounted_bytes?": Maybe(Each(dict, int)),
    "network?": Maybe({"nccl_ub?": _ASKED, "sharp?": _ASKED}),
    "engine?": Maybe(dict),
    "collectives?": Maybe(Each(list, _COLLECTIVE)),
    "step_time_s?": Maybe(Each(dict, NUMBER)),
    "initial_weights?": str,
    "final_weights?": str,
    "load?": Maybe({"at_start": NUMBER, "at_end": NUMBER, "others_cores": NUMBER}),
    "tensor_bytes?": Maybe({"persistent": Each(list, int), "peak": Each(list, int), "growth": Each(list, int)}),
    "other_replicas?": Maybe(Each(list, int)),
    "restored?": Maybe(_RESTORED),
    "decayed?": Maybe(Each(list, str)),
    "structure?": Maybe(_STRUCTURE),
}

CAPTURED: Shape = {
    "gradients": Each(list, int),
    "updates": Each(list, int),
    "final": bool,
    "num_bytes": int,
    "left_out": str,
}

FORWARD: Shape = {
    "version": int,
    "rows": int,
    "batch": Each(list, int, count=2),
    "modules": Each(list, {"name": str, "sketches": Each(list, NUMBER), "squares": NUMBER}),
}

STUDY: Shape = {
    "name": str,
    "question": str,
    "margins?": Maybe(Each(dict, NUMBER)),
    "window?": Maybe(int),
    "request?": Each(list, str),
    "folder?": str,
    "cells": Each(
        list,
        {"signature": str, "directory": str, "overrides?": Each(list, str), "control": Maybe(str)},
    ),
}

STEP: Mapping[str, Shape] = {
    "step": int,
    "loss?": Maybe(NUMBER),
    "grad_norm?": Maybe(NUMBER),
    "step_time_s?": Maybe(NUMBER),
    "tokens?": Maybe(NUMBER),
    "validation?": Each(dict, Maybe(NUMBER)),
    "skipped?": Maybe(bool),
    "time?": Each(dict, Maybe(NUMBER)),
    "memory?": Each(dict, Maybe(NUMBER)),
    "counters?": Each(dict, Maybe(NUMBER)),
    "comm?": Each(dict, {"count": int, "bytes": int}),
    "own?": Each(dict, NUMBER),
}

_WRONG_WEIGHT: Shape = {"rank": int, "tensor": str, "what": str}

WITNESS: Shape = {
    "terms": Each(dict, (str, *NUMBER)),
    "kept": Each(dict, int),
    "wrong_weights": Each(list, _WRONG_WEIGHT),
    "whole?": Each(list, str),
}
"""Observations of a captured step beside the engine; non-finite terms are texts."""

METADATA = "harness"
"""Entry of a captured step's safetensors metadata with its JSON."""

CAPTURED_STEP: Shape = {"step": int, "num_microbatches?": int, "plan?": CAPTURED}

ROUNDING: Shape = {"draws": int, "moves": Each(dict, Each(dict, Each(dict, NUMBER)))}

VIEW: Shape = {"name": str, "id": str, "project": str}
