"""Parameters of a model by the names that its author gave them, whatever has wrapped it."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

INSIDE = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Names under which `torch.compile`, checkpointing and FSDP1 keep the module that they wrap."""
OUTSIDE = "module"
"""Name under which DDP and others keep it, stripped where it begins every parameter's name."""


def models_of(model: nn.Module | Iterable[nn.Module]) -> list[nn.Module]:
    return [model] if isinstance(model, nn.Module) else list(model)


def named(models: Iterable[nn.Module]) -> dict[str, tuple[str, nn.Parameter]]:
    """By plain name: the name in the wrapped model, and the parameter; a tied one once. Raises `ValueError`: two
    pipeline stages have one name."""
    found: dict[str, tuple[str, nn.Parameter]] = {}
    for model in models:
        for raw, plain, param in _of_one(model):
            if plain in found:
                raise ValueError(f"two models have a parameter {plain}: watch each with a run of its own")
            found[plain] = raw, param
    return found


def plain_name(raw: str) -> str:
    return ".".join(part for part in raw.split(".") if part not in INSIDE)


def _of_one(model: nn.Module) -> list[tuple[str, str, nn.Parameter]]:
    params = [(raw, plain_name(raw).split("."), param) for raw, param in model.named_parameters()]
    while params and all(len(parts) > 1 and parts[0] == OUTSIDE for _, parts, _ in params):
        params = [(raw, parts[1:], param) for raw, parts, param in params]
    return [(raw, ".".join(parts), param) for raw, parts, param in params]
