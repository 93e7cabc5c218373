"""A mixture of experts: the decoder with routed feed-forwards in place of dense ones.

A router scores every expert for every token; the token goes to the `experts_per_token` best, whose outputs are added,
each times its probability: a softmax over all experts, not renormalised over the chosen (as in OLMoE), so that the
router learns with one expert a token too. There is no load-balancing loss and no capacity limit: a sequence's output
does not depend on its microbatch, and `loss` stays nats a token.

An expert without tokens is skipped and its parameters get no gradient; with `model.skip_idle=false` it runs on zero
tokens and they get zeros, the same in value.

[Note: Routes flip] Choosing is discontinuous: runs that round differently send a token with almost equal scores to
different experts, at any scale of the router. docs/verdicts.md measures it.

Shapes are suffixes as in `llama`; T tokens of the microbatch, N experts, K experts a token, R tokens of one expert.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from harness.config.schema import ModelConfig
from harness.models import llama
from harness.models.workload import LlamaWorkload


class Router(llama.Linear):
    """Scores of all experts, computed in fp32 (fp64 in an fp64 model) whatever the dtype of stream and weight."""

    def forward(self, x_TD: Tensor) -> Tensor:
        """[T, N], fp32 or wider."""
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        return nn.functional.linear(x_TD.to(wide), self.weight.to(wide))


class RoutedFeedForward(nn.Module):
    """num_experts SwiGLU feed-forwards, of which each token uses experts_per_token."""

    def __init__(self, config: ModelConfig, device: torch.device | str, dtype: torch.dtype) -> None:
        super().__init__()
        self.experts_per_token = config.experts_per_token
        self.skip_idle = config.skip_idle
        self.router = Router(config.dim, config.num_experts, device, dtype)
        self.experts = nn.ModuleList(llama.FeedForward(config, device, dtype) for _ in range(config.num_experts))

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_TD = x_BSD.flatten(0, 1)
        gates_TK, chosen_TK = self.router(x_TD).softmax(-1).topk(self.experts_per_token, dim=-1)
        out_TD = torch.zeros_like(x_TD)
        for number, expert in enumerate(self.experts):
            # A token chooses an expert at most once, so the rows added to are distinct and no order of sums matters.
            rows_R, places_R = (chosen_TK == number).nonzero(as_tuple=True)
            if self.skip_idle and rows_R.numel() == 0:
                continue
            gate_R1 = gates_TK[rows_R, places_R].unsqueeze(-1).to(x_TD.dtype)
            out_TD = out_TD.index_add(0, rows_R, expert(x_TD[rows_R]) * gate_R1)
        return out_TD.view_as(x_BSD)


class Block(llama.Block):
    feed_forward_class = RoutedFeedForward


class Moe(llama.Llama):
    block_class = Block


class MoeWorkload(LlamaWorkload):
    decoder = Moe
