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


def fault(value: Any, shape: Shape) -> str:
    """Why `value` does not have this shape, in a sentence; empty if it does."""
    wrong = _fault(value, shape)
    if wrong is None:
        return ""
    *keys, said = wrong
    return f"{'.'.join(keys) or 'it'} {said}"


def _fault(value: Any, shape: Shape) -> tuple[str, ...] | None:
    """Keys that lead to a value of another shape, and what is wrong with it; None if there is none."""
    if type(value) is shape:
        return None
    if isinstance(shape, type | tuple):
        return _kind_fault(value, shape)
    if isinstance(shape, Maybe):
        return None if value is None else _fault(value, shape.of)
    if isinstance(shape, Each):
        return _kind_fault(value, shape.container) or _each_fault(value, shape)
    return _kind_fault(value, dict) or _table_fault(value, shape)


def _each_fault(value: Any, shape: Each) -> tuple[str, ...] | None:
    if shape.count not in (None, len(value)):
        return (f"has {len(value)} values, not {shape.count}",)
    items = value.values() if isinstance(value, dict) else value
    if isinstance(shape.of, type | tuple) and {*map(type, items)} <= {*_kinds(shape.of)}:
        return None
    for key, item in zip(value if isinstance(value, dict) else range(len(value)), items, strict=True):
        if wrong := _fault(item, shape.of):
            return (str(key), *wrong)
    return None


def _table_fault(table: Mapping[str, Any], shape: Mapping[str, Any]) -> tuple[str, ...] | None:
    for key, of in shape.items():
        name = key[:-1] if key[-1] == "?" else key
        if name in table:
            if wrong := _fault(table[name], of):
                return (name, *wrong)
        elif name == key:
            return (name, "is missing")
    return None


def _kinds(kinds: type | tuple[type, ...]) -> tuple[type, ...]:
    return kinds if isinstance(kinds, tuple) else (kinds,)


def _kind_fault(value: Any, kinds: type | tuple[type, ...]) -> tuple[str] | None:
    wanted = _kinds(kinds)
    if isinstance(value, wanted) and not (isinstance(value, bool) and bool not in wanted):
        return None
    found = "null" if value is None else _NAMES.get(type(value), type(value).__name__)
    return (f"is {found}, not {_NAMES[wanted[-1]]}",)


LISTED: Shape = {"version": int, "files": Each(dict, {"bytes": int, "xxh3": str})}
CONFIG: Shape = {
    **dict.fromkeys(("fault?", "numerics?", "data?", "optimizer?", "ckpt?", "cluster?", "launch?", "wandb?"), dict),
    "model?": {"name?": str},
    "engine?": {"name?": str},
    "sharding?": {"strategy?": str},
    "dtype?": {"name?": str},
    "mesh?": {"world_size?": int},
    "study?": {"name?": str},
    "run?": {"name?": Maybe(str)},
    "train?": {"steps?": int, "replicate?": int},
    "measure?": {
        "capture_steps?": Maybe(Each(list, int)),
        "update_steps?": Maybe(Each(list, int)),
        "warmup_steps?": int,
    },
    "notes?": str,
}
"""No key is required: versions differ in their settings (`RunDir.setting` reports missing ones)."""
_OWN: Shape = {"kind": str, "name": str, "root": str, "files": Each(list, str), "digest": str}
PROVENANCE: Shape = {
    "sources_digest?": str,
    "versions?": Each(dict, str),
    "environment?": Each(dict, str),
    "hosts?": Each(list, str),
    "kernels?": Each(dict, str),
    "git?": Maybe({"sha": str, "dirty": bool}),
    "own?": Each(list, _OWN),
}
_ASKED: Shape = {"requested": str, "effective": str}
_RESTORED: Shape = {"step": int, "wrong": Each(list, str)}
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
    "planned?": Maybe(Each(dict, Maybe(int))),
    "other_replicas?": Maybe(Each(list, int)),
    "restored?": Maybe(_RESTORED),
    "step_checks?": {"steps": int, "every": int, "seconds": NUMBER},
    "worked_out_again?": {"steps": int, "seconds": NUMBER},
    "decayed?": Maybe(Each(list, str)),
    "orthogonalized?": Maybe(Each(list, str)),
}
CAPTURED: Shape = {
    "gradients": Each(list, int),
    "updates": Each(list, int),
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
    "cells": Each(list, {"signature": str, "directory": str, "overrides?": Each(list, str), "control": Maybe(str)}),
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
    "wrong_weights": Each(list, _WRONG_WEIGHT),
    "whole?": Each(list, str),
}
"""Observations of a captured step beside the engine; non-finite terms are texts."""
METADATA = "harness"
"""Entry of a captured step's safetensors metadata with its JSON."""
CAPTURED_STEP: Shape = {"step": int, "num_microbatches?": int, "plan?": CAPTURED}
ROUNDING: Shape = {"draws": int, "moves": Each(dict, Each(dict, Each(dict, NUMBER)))}
VIEW: Shape = {"name": str, "id": str, "project": str}
