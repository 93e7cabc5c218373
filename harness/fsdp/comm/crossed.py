"""All ranks of a model, also where tensor parallelism puts a second axis beside the data-parallel ones."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from harness.fsdp.comm.communicator import Communicator
from harness.fsdp.comm.device import DeviceRuntime


class Everyone(Protocol):
    runtime: DeviceRuntime

    @property
    def rank(self) -> int:
        """This rank's place among them."""

    @property
    def size(self) -> int:
        """How many there are."""

    def sum_scalars(self, values: Tensor, purpose: str) -> Tensor:
        """Sum a few fp64 or int64 values, in place; returns them. *Collective.*"""

    def from_first(self, value: Tensor, purpose: str) -> Tensor:
        """Value of the first rank; `value` has its shape and dtype on every rank. *Collective.*"""


class Crossed:
    """The ranks of a grid, data-parallel by tensor-parallel: told along one axis and then along the other.

    Args:
        data: the data-parallel ranks that have this rank's portion of every parameter.
        tensor: the tensor-parallel ranks that have the other portions, with this rank's rows.
    """

    def __init__(self, data: Communicator, tensor: Communicator) -> None:
        self.data, self.tensor = data, tensor
        self.runtime = data.runtime

    @property
    def rank(self) -> int:
        """This rank's place: data-parallel rank by tensor-parallel rank."""
        return self.data.rank * self.tensor.size + self.tensor.rank

    @property
    def size(self) -> int:
        return self.data.size * self.tensor.size

    def sum_scalars(self, values: Tensor, purpose: str) -> Tensor:
        """Sum a few fp64 or int64 values over the grid, in place; returns them. *Collective.*"""
        self.data.sum_scalars(values, purpose)
        return self.tensor.sum_scalars(values, f"{purpose} over tensor-parallel ranks")

    def from_first(self, value: Tensor, purpose: str) -> Tensor:
        """Value of the grid's first rank. *Collective.*"""
        along = self.tensor.from_first(value, f"{purpose} over tensor-parallel ranks")
        return self.data.from_first(along, purpose)
