"""Aliased tensors that should be separate, and tied ones that should not."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

Range = tuple[int, int, str]
"""First byte, one past the last, name."""


def overlaps(state: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    """Pairs of an engine's own tensors, of more than one element each, that share bytes; neighbours in memory only.

    Step counts are left out: one counter may serve many tensors.
    """
    ranges: dict[str, list[Range]] = {}
    for name, tensor in state.items():
        if tensor.numel() > 1 and tensor.is_contiguous():
            start = tensor.data_ptr()
            ranges.setdefault(str(tensor.device), []).append(
                (start, start + tensor.numel() * tensor.element_size(), name)
            )
    return [pair for held in ranges.values() for pair in _neighbours(sorted(held))]


def _neighbours(held: list[Range]) -> list[tuple[str, str]]:
    found = []
    end, owner = 0, ""
    for start, stop, name in held:
        if start < end:
            found.append((owner, name))
        if stop > end:
            end, owner = stop, name
    return found


def untied(fresh: nn.Module, module: nn.Module) -> list[str]:
    """Names of tied weights in a fresh model that are separate in this module.

    Args: fresh: before an engine; may be on meta. module: the same model after an engine.
    """
    return [name for name, first in _ties(fresh).items() if _at(module, name) is not _at(module, first)]


def _ties(fresh: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    found = {}
    for name, param in fresh.named_parameters(remove_duplicate=False):
        if id(param) in first:
            found[name] = first[id(param)]
        first.setdefault(id(param), name)
    return found


def _at(module: nn.Module, name: str) -> object:
    found: object = module
    for step in name.split("."):  # not by `_modules`: a wrapper may lie between, which passes names on
        found = getattr(found, step, None)
    return object() if found is None else found
