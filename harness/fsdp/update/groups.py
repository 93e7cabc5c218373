"""Which optimizer updates which parameter, and by the settings of which of its groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from harness.fsdp.storage.bucket import Bucket
from harness.fsdp.tensor_parallel.declared import successor_of
from harness.fsdp.update.kernels import named


class Groups:
    """Parameter groups of the optimizers of one model; each parameter is in one at most. A group goes by its place.

    Args:
        buckets: of the model.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.buckets = buckets
        self._groups: list[tuple[Optimizer, int]] = []
        """An optimizer and one of its groups."""
        self._chosen: list[tuple[Optimizer, int, dict[str, Any]]] = []
        """An optimizer, one of its groups, and what the user had where the engine has chosen."""
        self.places: dict[str, int] = {}
        """Group by parameter, those of frozen ones among them."""

    def names_of(self, groups: Sequence[Mapping[str, Any]]) -> dict[str, int]:
        """Parameters by name, and which of `groups` each is in.

        Raises:
            ValueError: one is not the model's, or an optimizer updates it already.
        """
        names = {id(param): name for bucket in self.buckets for name, param in bucket.params}
        found: dict[str, int] = {}
        for index, group in enumerate(groups):
            for param in group["params"]:
                name = names.get(id(successor_of(param)))
                if name is None:
                    raise ValueError(
                        f"optimizer group {index} holds a tensor of shape {tuple(param.shape)} that is no parameter of"
                        " the sharded module; build the optimizer over parameters of that module alone"
                    )
                if name in self.places:
                    owner = type(self.optimizer(self.places[name])).__name__
                    raise ValueError(
                        f"parameter {name} has an optimizer already ({owner}); give it to one alone. To go on with"
                        " another optimizer, build the module anew, shard it with that, and give it this model's"
                        " state_dict()"
                    )
                found[name] = index
        return found

    def add(self, optimizer: Optimizer, index: int, names: Sequence[str]) -> dict[str, int]:
        """Take in a group of an optimizer, with the parameters it was given; returns them with its place."""
        found = dict.fromkeys(names, len(self._groups))
        self._groups.append((optimizer, index))
        self.places |= found
        return found

    def choose(self, optimizer: Optimizer, index: int, settings: Mapping[str, Any]) -> None:
        """Give a group settings of the engine's choice; `given` tells what the user had."""
        group = optimizer.param_groups[index]
        self._chosen.append((optimizer, index, {name: group[name] for name in settings}))
        group.update(settings)

    def given(self, optimizer: Optimizer) -> list[dict[str, Any]]:
        """Settings of every group of an optimizer as the user has them, `params` left out."""
        groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        for owner, index, before in self._chosen:
            if owner is optimizer:
                groups[index] |= before
        return groups

    def kernels(self) -> list[str]:
        """How each group is stepped, and whether the user or the engine has chosen it."""
        return [
            f"{named(owner.param_groups[index])}, {'chosen by the engine' if before else 'as given'}"
            for owner, index, before in self._chosen
        ]

    @property
    def optimizers(self) -> list[Optimizer]:
        """All of them, in the order they came."""
        found: list[Optimizer] = []
        for optimizer, _ in self._groups:
            found += [] if any(each is optimizer for each in found) else [optimizer]
        return found

    def names_by_group(self, optimizer: Optimizer) -> list[list[str]]:
        """Names of the parameters each group of an optimizer was given, in its order, frozen ones among them."""
        places = sorted(self.places_of(optimizer))
        return [[name for name, other in self.places.items() if other == place] for place in places]

    def places_of(self, optimizer: Optimizer | None) -> set[int]:
        """Groups of an optimizer; None: of all."""
        return {place for place, (each, _) in enumerate(self._groups) if optimizer is None or each is optimizer}

    def optimizer(self, place: int) -> Optimizer:
        """Whose group this is."""
        return self._groups[place][0]

    def settings(self, place: int) -> dict[str, Any]:
        """What the group's parameters are stepped with, and in `params` what is stepped."""
        optimizer, index = self._groups[place]
        found: dict[str, Any] = optimizer.param_groups[index]
        return found
