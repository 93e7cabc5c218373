"""Models that say more of themselves than tensors, or in other ways, when they are saved and loaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.fsdp.pairs import WIDTH, Model


class Normed(Model):
    """With buffers that follow each rank's own data, one that is not saved, and tied weights."""

    def __init__(self, seed: int = 3) -> None:
        super().__init__(seed)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class Telling(Normed):
    """Says more of itself than tensors, by a method and by hooks, and is checkpointed in part."""

    def __init__(self, seed: int = 3) -> None:
        super().__init__(seed)
        self.seen = 0
        self.blocks[1] = checkpoint_wrapper(self.blocks[1])
        self.register_state_dict_post_hook(lambda _, found, prefix, __: found.update({f"{prefix}note": torch.ones(1)}))
        self.register_load_state_dict_pre_hook(lambda _, given, prefix, *__: given.pop(f"{prefix}note"))
        self.register_load_state_dict_post_hook(lambda part, _: setattr(part, "loads", getattr(part, "loads", 0) + 1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return super().forward(x)

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


class Holder(nn.Module):
    """A module of the program's around a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


class Old(nn.Linear):
    """Was once saved as one tensor, with the bias as its last column, and is saved with a note."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}format"] = torch.tensor(2)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        state_dict.pop(f"{prefix}format", None)
        if f"{prefix}both" in state_dict:
            both = state_dict.pop(f"{prefix}both")
            state_dict |= {f"{prefix}weight": both[:, :-1], f"{prefix}bias": both[:, -1]}
        super()._load_from_state_dict(state_dict, prefix, *others)


class Packed(nn.Linear):
    """Loads by itself."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        with torch.no_grad():
            self.weight.copy_(state_dict[f"{prefix}packed"] * 2)


class Aged(Normed):
    """Has its own ways to save and to load, and parts that have theirs."""

    def __init__(self, seed: int = 3) -> None:
        super().__init__(seed)
        self.old, self.packed = Old(WIDTH, 2), Packed(WIDTH, 2, bias=False)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        found = super().state_dict(*args, **kwargs)
        return type(found)((name, value) for name, value in found.items() if "packed" not in name)

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override] # as people write it
        return super().load_state_dict({name.removeprefix("module."): v for name, v in state_dict.items()}, strict)


class Piecewise(Aged):
    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:
        return self.old.load_state_dict(state_dict)
