"""Habits that people have, a program each: what docs/compatibility.md is about."""

from __future__ import annotations

from typing import Any

from tests.fsdp.ordinary.program import Program


def _of(**chosen: Any) -> Program:
    return Program(**({"seed": 0, "pieces": ("Mlp", "Mlp"), "dtype": "fp32", "optimizer": "sgd"} | chosen))


SCENARIOS: dict[str, dict[str, Program]] = {
    "Loops": {
        "forward, backward, step, `zero_grad()`": _of(),
        "`zero_grad()` first": _of(zero="start"),
        "`zero_grad(set_to_none=False)`, a branch in every other step": _of(
            zero="zeros", pieces=("InTurns",), optimizer="momentum"
        ),
        "`p.grad = None` for all parameters": _of(zero="none"),
        "`model.module.zero_grad()`": _of(zero="module"),
        "accumulation, `no_sync()` but for the last": _of(k=2),
        "accumulation, without `no_sync()`": _of(k=2, accumulate="each"),
        "two forwards, one backward": _of(loop="two_forwards"),
        "two backwards of one forward, the first inside `no_sync()`": _of(loop="two_losses"),
        "`step(closure)`": _of(loop="closure", zero="start"),
        "evaluation after each step": _of(between="eval"),
        "`inference_mode()` after each step": _of(between="inference"),
        "validation with gradients on": _of(between="validation"),
        "evaluation between forward and backward": _of(between="interrupted"),
        "the same, where ranks use different layers": _of(
            between="interrupted", pieces=("DroppedApart", "Mlp"), optimizer="momentum"
        ),
        "a forward whose loss is given up": _of(aside="retries"),
        "`torch.autograd.grad` of an input": _of(aside="saliency"),
    },
    "Gradients": {
        "clipping, as the engine has it": _of(clip="ours"),
        "clipping by the largest, as the engine has it": _of(clip="infinity"),
        "`torch.nn.utils.clip_grad_norm_`": _of(clip="torch"),
        "`torch.nn.utils.clip_grad_value_`": _of(clip="value"),
        "reading `p.grad` for a log": _of(aside="reads"),
        "`torch.amp.GradScaler`": _of(aside="scaler"),
        "`GradScaler(enabled=False)`": _of(aside="scaler_off"),
    },
    "Weights between steps": {
        "an L2 penalty over `parameters()`": _of(aside="penalty"),
        "an average by `zip(average, parameters())`": _of(aside="ema"),
        "an average, weights gathered": _of(aside="gathered_ema"),
        "`p.data.clamp_()`, weights gathered": _of(aside="clamps"),
        "`get_model_state_dict`, `set_model_state_dict`": _of(aside="saves"),
        "`copy.deepcopy(model)`": _of(aside="copies"),
    },
    "Models": {
        "tied embedding and head": _of(tied=True),
        "norms": _of(pieces=("Norms", "Mlp")),
        "convolutions": _of(pieces=("Conv", "Mlp")),
        "a GRU": _of(pieces=("Recurrent", "Mlp")),
        "`nn.MultiheadAttention` in a unit": _of(pieces=("Attention", "Mlp")),
        "`nn.MultiheadAttention`, units are `nn.Linear`": _of(pieces=("Attention", "Mlp"), units="linear"),
        "`nn.TransformerEncoderLayer`": _of(pieces=("Encoder", "Mlp")),
        "one block three times in a forward": _of(pieces=("Looped", "Mlp")),
        "activation checkpointing around units": _of(pieces=("Checkpointed", "Checkpointed")),
        "activation checkpointing inside units": _of(pieces=("CheckpointedInside", "Mlp")),
        "reentrant checkpointing": _of(pieces=("Reentrant", "Mlp")),
        "a branch no rank takes": _of(pieces=("Unused", "Mlp"), optimizer="momentum"),
        "branches in turns": _of(pieces=("InTurns", "Mlp"), optimizer="momentum"),
        "layers dropped by all ranks": _of(pieces=("DroppedTogether", "Mlp"), optimizer="momentum"),
        "layers dropped by some ranks": _of(pieces=("DroppedApart", "Mlp"), optimizer="momentum"),
        "experts chosen by each rank's data": _of(pieces=("Experts", "Mlp")),
        "experts as units": _of(pieces=("Experts", "Mlp"), units="linear"),
        "`weight_norm`": _of(pieces=("WeightNorm", "Mlp")),
        "parameters of modules' own, a scalar among them": _of(pieces=("Bare", "Mlp")),
        "a unit uses a weight of the root": _of(pieces=("Borrowing", "Mlp")),
        "one layer in two units": _of(pieces=("Shared", "Shared")),
        "a term of the loss left as an attribute": _of(pieces=("Auxiliary", "Mlp")),
        "a unit edits its input in place": _of(pieces=("InPlace", "Mlp")),
        "inputs and outputs in a dict": _of(carry="dict"),
        "in a list": _of(carry="list"),
        "in a dataclass": _of(carry="dataclass"),
        "in an object of the program's own": _of(carry="object"),
        "no units": _of(units="none"),
    },
    "Freezing": {
        "the embedding": _of(freezing="embedding"),
        "frozen norms": _of(freezing="norms", pieces=("Norms", "Mlp")),
        "frozen norms, inputs in a dict": _of(freezing="norms", pieces=("Norms", "Mlp"), carry="dict"),
        "all but biases": _of(freezing="biases_only"),
        "a layer, between steps": _of(freezing="later"),
    },
    "Adapters and late changes": {
        "a gradient edited in a post-accumulate hook, accumulation": _of(aside="edits_gradients", k=2),
        "an optimizer of some weights, `optimizer.zero_grad()`, clipping": _of(given="pieces", clip="torch"),
        "LoRA in reentrant checkpoints": _of(
            pieces=("Adapted", "Adapted"), freezing="all_but_adapters", given="trained", optimizer="adamw"
        ),
        "`checkpoint_wrapper` after sharding": _of(aside="checkpoints_late"),
        "weights tied after sharding": _of(aside="ties_late"),
        "blocks swapped after sharding": _of(aside="swaps_late"),
        "`set_model_state_dict(broadcast_from_rank0=True)`": _of(aside="loads_of_first"),
    },
    "Optimizers": {
        "built after sharding": _of(order="after"),
        "built after sharding, clipping, branches in turns": _of(
            order="after", clip="ours", pieces=("InTurns",), optimizer="momentum"
        ),
        "AdamW": _of(optimizer="adamw"),
        "SGD with momentum and decay": _of(optimizer="momentum"),
        "Adagrad": _of(optimizer="adagrad"),
        "RMSprop": _of(optimizer="rmsprop"),
        "a subclass of AdamW": _of(optimizer="subclass"),
        "LBFGS": _of(dtype="fp64", optimizer="lbfgs", loop="closure", zero="start"),
        "several groups": _of(given="groups"),
        "`named_parameters()`": _of(given="named"),
        "`add_param_group`": _of(aside="adds_group", zero="model"),
        "a scheduler": _of(aside="scheduler"),
        "rates set by hand": _of(aside="rates"),
        "two optimizers": _of(loop="two_optimizers", zero="start"),
        "two optimizers in turns": _of(loop="in_turns", zero="start", order="explicit"),
        "a generator and a critic": _of(loop="gan", zero="start"),
        "`optimizer.state_dict()`": _of(aside="saves_optimizer"),
    },
}
"""By heading and habit."""
