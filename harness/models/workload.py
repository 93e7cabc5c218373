"""Interface of every model here to an engine: construction, initial weights, loss."""

from __future__ import annotations

import hashlib
import math
import re
from abc import ABC, abstractmethod
from pkgutil import resolve_name

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from harness.config.derived import may_leave_unused
from harness.config.schema import Config, ModelFamily
from harness.fp8.linear import Fp8Linear
from harness.models import llama

NOT_ORTHOGONALIZED = re.compile(r"(^|\.)(\w*emb\w*|wte|wpe|(\w+_)?head|output)(\.|$)")

RESIDUAL_PROJECTIONS = ("attention.wo.weight", "w_down.weight")
"""Suffixes of matrices that write into the residual stream; they start smaller, by 1 / sqrt(2 * num_layers)."""


IN_8_BITS = ("wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down")
"""Weights that are multiplied in 8 bits under `dtype.fp8`: the projections of attention and feed-forward, an expert's
too, as in TransformerEngine and torchtitan. Embedding, head, norms and routers stay in the compute dtype: a lookup has
no product, logits and routes are sensitive, and vectors are small.
"""


class TokenWorkload(ABC):
    """A model as engines use it. A user's own class need not be a subclass of this one."""

    unit_classes: tuple[type[nn.Module], ...]
    """Modules whose parameters are gathered and released together."""

    def __init__(self, config: Config) -> None:
        self.model_config = config.model
        self.seed = config.train.seed
        self.may_leave_unused = may_leave_unused(config)
        """True if a microbatch may leave trained parameters without a gradient, on each rank other ones."""
        self.recipe = config.dtype.fp8

    @abstractmethod
    def build(self, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
        """Module with uninitialised parameters of `dtype`; "meta" allocates nothing, not even buffers."""

    def cut(self, model: nn.Module, axis: DeviceMesh, *, sequence_parallel: bool) -> None:
        """Cut a built module in place over a tensor-parallel axis; names do not change. Collective over it.

        Raises `NotImplementedError`: the family declares no plan.
        """
        raise NotImplementedError(f"{type(self).__name__} declares no plan of tensor parallelism")

    def quantize(self, model: nn.Module, device: torch.device) -> None:
        """Make projections multiply in 8 bits, in place, under dtype.fp8, with scaling state on `device`.

        Raises `ValueError`: no projections, or sizes that the recipe cannot tile.
        """
        if self.recipe is not None:
            chosen = lambda name, _: name.rpartition(".")[2] in IN_8_BITS  # noqa: E731 - a name for it says more
            Fp8Linear.convert(model, self.recipe, chosen)

    @abstractmethod
    def materialise_buffers(self, model: nn.Module, device: torch.device) -> None:
        """Compute the buffers of a module built on meta, in their declared dtype."""

    def initial_weight(self, name: str, shape: torch.Size) -> Tensor:
        """Full initial value of one parameter: fp32, CPU, a function of name, shape and `train.seed`."""
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.float32, device="cpu")
        std = self.model_config.init_std
        if name.endswith(RESIDUAL_PROJECTIONS):
            std /= math.sqrt(2 * self.model_config.num_layers)
        return self._normal(name, shape, std)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean cross entropy, in nats a token, of tokens and targets, [B, S] int64; fp32, or fp64 in an fp64 model."""
        tokens_BS, targets_BS = batch
        logits_BSV = model(tokens_BS)
        wide_BSV = logits_BSV.to(torch.promote_types(logits_BSV.dtype, torch.float32))
        return F.cross_entropy(wide_BSV.flatten(0, 1), targets_BS.flatten())

    def decays(self, name: str, shape: torch.Size) -> bool:
        """True if weight decay applies: to matrices, not to vectors (norm scales, biases, gains)."""
        return len(shape) > 1

    def orthogonalizes(self, name: str, shape: torch.Size) -> bool:
        """True if Muon steps it: matrices, but for embeddings and heads, which are known by usual names."""
        return len(shape) == 2 and not NOT_ORTHOGONALIZED.search(name)

    def _normal(self, name: str, shape: torch.Size, std: float) -> Tensor:
        digest = hashlib.blake2b(f"{self.seed}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest, "little") >> 1)
        return torch.empty(shape, dtype=torch.float32, device="cpu").normal_(0.0, std, generator=generator)


class LlamaWorkload(TokenWorkload):
    """The decoder.

    Units are the embedding, every block, and the head, so that the root owns no parameter. A tied embedding is used at
    both ends of the forward and stays with the root.
    """

    decoder: type[llama.Llama] = llama.Llama

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.unit_classes = (llama.Embedding, self.decoder.block_class, llama.Head)
        if config.model.tie_embeddings:
            self.unit_classes = (self.decoder.block_class, llama.Head)

    def build(self, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
        return self.decoder(self.model_config, device, dtype)

    def cut(self, model: nn.Module, axis: DeviceMesh, *, sequence_parallel: bool) -> None:
        if type(model) is not llama.Llama:
            super().cut(model, axis, sequence_parallel=sequence_parallel)
        assert isinstance(model, llama.Llama)
        llama.cut(model, axis, sequence_parallel=sequence_parallel)

    def materialise_buffers(self, model: nn.Module, device: torch.device) -> None:
        assert isinstance(model, llama.Llama)
        model.cos_SE, model.sin_SE = llama.rotary_tables(self.model_config, model.cos_SE.dtype, device)


WORKLOADS = {
    ModelFamily.llama: "harness.models.workload:LlamaWorkload",
    ModelFamily.moe: "harness.models.moe:MoeWorkload",
    ModelFamily.odd: "harness.models.odd:OddWorkload",
}


def workload_for(config: Config) -> TokenWorkload:
    own = config.model.family is ModelFamily.ext
    workload: TokenWorkload = resolve_name(str(config.model.target if own else WORKLOADS[config.model.family]))(config)
    return workload
