"""The text of a program, as a user of an engine would type it: what runs is what a failure prints."""

from __future__ import annotations

from textwrap import indent

from tests.fsdp.ordinary.program import CHOICES, OPTIMIZERS, ZEROS, Program

STEPS = 4
DTYPES = {"fp64": "torch.float64", "fp32": "torch.float32", "bf16": "torch.bfloat16"}
UNITS = {"pieces": "[Piece]", "none": "None", "linear": "[nn.Linear]"}
FREEZING = {
    "embedding": "model.embed.requires_grad_(False)",
    "norms": "model.norm.requires_grad_(False)\n"
    "for name, p in model.pieces.named_parameters():\n"
    "    p.requires_grad_(not any(kind in name for kind in ('layer', 'rms', 'group', 'gain')))",
    "all_but_adapters": "for name, p in model.named_parameters():\n    p.requires_grad_('adapter' in name)",
    "biases_only": "for name, p in model.named_parameters():\n    p.requires_grad_('bias' in name)",
    "first_piece": "model.pieces[0].requires_grad_(False)",
    "first_layers": "for name, p in model.pieces.named_parameters():\n    p.requires_grad_('up' not in name)",
}
LATE = "model.norm"
"""What `add_param_group` brings in later, and a second optimizer has."""


def text_of(program: Program) -> str:
    """The program, under our engine's names."""
    lines = [f"model = Net({program.pieces}, carry={program.carry!r}, tied={program.tied}).to({DTYPES[program.dtype]})"]
    if program.choice == "mixed":
        lines.append("for piece in model.pieces:\n    piece.down = Narrower(piece.down)")
    if program.freezing in FREEZING:
        lines.append(FREEZING[program.freezing])
    lines += _sharded(program)
    lines += BEFORE.get(program.aside, [])
    lines.append(f"for step in range({STEPS}):")
    lines += [_in(line) for line in _step(program)]
    return "\n".join(lines) + "\n"


def _in(text: str) -> str:
    return indent(text, "    ")


# -- sharding ----------------------------------------------------------------------------------------------------------


def arguments(program: Program) -> str:
    """Of `fully_shard`, after the optimizer."""
    given = [f"fsdp_unit_modules={UNITS[program.units]}", f'zero_dp_strategy="{program.strategy}"']
    if program.dtype != "fp32":
        given.append(f"mixed_precision_policy={'WIDE' if program.dtype == 'fp64' else 'NARROW'}")
    if program.hybrid:
        given += ["device_mesh=mesh", 'dp_shard_dim="shard"', 'dp_outer_dim="outer"']
        given.append(f'outer_dp_sharding_strategy="{program.hybrid}"')
    if CHOICES[program.choice]:
        given.append(CHOICES[program.choice])
    return ", ".join(given)


def _sharded(program: Program) -> list[str]:
    """Model and optimizers, in the order asked for."""
    first, second = _parameters(program)
    makes = f"optimizer = torch.optim.{OPTIMIZERS[program.optimizer]}".format(first).replace(
        "torch.optim.Renamed", "Renamed"
    )
    lines = {
        "wrapped": [makes, f"model, optimizer = fully_shard(model, optimizer, {arguments(program)})"],
        "after": [f"model = fully_shard_model(model, {arguments(program)})", makes],
        "explicit": [
            f"model = fully_shard_model(model, {arguments(program)})",
            makes,
            "optimizer = fully_shard_optimizer(model, optimizer)",
        ],
    }[program.order]
    if second:
        lines.append(f"second = torch.optim.SGD({second}, lr=0.05, momentum=0.9)")
        lines += ["second = fully_shard_optimizer(model, second)"] if program.order == "explicit" else []
    if program.loop == "gan":
        lines += [
            f"critic = Critic().to({DTYPES[program.dtype]})",
            "second = torch.optim.SGD(critic.parameters(), lr=0.05, momentum=0.9)",
            f"critic, second = fully_shard(critic, second, {arguments(program)})",
        ]
    return lines


def _parameters(program: Program) -> tuple[str, str]:
    """What the optimizer is given, and a second one."""
    if program.loop in ("two_optimizers", "in_turns"):
        return "model.pieces.parameters()", "[p for n, p in model.named_parameters() if not n.startswith('pieces')]"
    if program.aside == "adds_group":
        return f"[p for n, p in model.named_parameters() if not n.startswith('{LATE[6:]}')]", ""
    return {
        "parameters": "model.parameters()",
        "pieces": "model.pieces.parameters()",
        "trained": "[p for p in model.parameters() if p.requires_grad]",
        "named": "model.named_parameters()",
        "groups": "[{'params': [p for p in model.parameters() if p.dim() > 1]},"
        " {'params': [p for p in model.parameters() if p.dim() <= 1], 'lr': 0.01, 'weight_decay': 0.0}]",
    }[program.given], ""


# -- a step ------------------------------------------------------------------------------------------------------------

BEFORE = {
    "scheduler": ["scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)"],
    "ema": ["average = [torch.zeros_like(p) for p in model.parameters()]"],
    "gathered_ema": ["average = [torch.zeros_like(p) for p in model.parameters()]"],
    "scaler": ["scaler = torch.amp.GradScaler('cpu', init_scale=4.0)"],
    "scaler_off": ["scaler = torch.amp.GradScaler('cpu', enabled=False)"],
    "edits_gradients": [
        "def edit(p):\n    p.grad.mul_(0.0)",
        "for p in model.norm.parameters():\n    p.register_post_accumulate_grad_hook(edit)",
    ],
    "checkpoints_late": ["for i, piece in enumerate(model.pieces):\n    model.pieces[i] = checkpoint_wrapper(piece)"],
    "ties_late": ["model.head.weight = model.embed.weight"],
    "swaps_late": ["model.pieces[0], model.pieces[1] = model.pieces[1], model.pieces[0]"],
}
AFTER = {
    "scheduler": "scheduler.step()",
    "rates": "for group in optimizer.param_groups:\n    group['lr'] *= 0.7",
    "ema": "for a, p in zip(average, model.parameters()):\n    a.lerp_(p.detach(), 0.5)\n    observe(a)",
    "gathered_ema": "with model.unsharded():\n    for a, p in zip(average, model.parameters()):\n"
    "        a.lerp_(p.detach(), 0.5)\n        observe(a)",
    "clamps": "with model.unsharded():\n    for p in model.parameters():\n        p.data.clamp_(-0.4, 0.4)",
    "saves": "if step == 1:\n"
    "    saved = {k: v.clone() for k, v in get_model_state_dict(model, options=FULL).items()}\n"
    "if step == 2:\n    set_model_state_dict(model, saved, options=FULL)",
    "loads_of_first": "if step == 1:\n"
    "    saved = {k: v.clone() for k, v in get_model_state_dict(model, options=FULL).items()}\n"
    "if step == 2:\n    set_model_state_dict(model, saved if is_first else {}, options=OF_FIRST)",
    "saves_optimizer": "if step == 1:\n    saved = optimizer.state_dict()",
    "copies": "if step == 1:\n    average = copy.deepcopy(model)",
    "adds_group": f"if step == 1:\n    optimizer.add_param_group({{'params': list({LATE}.parameters()), 'lr': 0.01}})",
    "saliency": "for batch in validation(step):\n"
    "    x = torch.zeros((), requires_grad=True)\n"
    "    observe(torch.autograd.grad(loss_of(model(batch), batch) + x, x)[0], batch)",
}
EVALUATIONS = {
    "eval": "model.eval()\nwith torch.no_grad():\n{each}model.train()",
    "inference": "with torch.inference_mode():\n{each}",
    "validation": "{plain}",
}
EACH = "for batch in validation(step):\n    observe(loss_of(model(batch), batch), batch)\n"
FREEZES_LATER = "if step in (1, 3):\n    model.pieces[0].requires_grad_(step == 3)"


def _step(program: Program) -> list[str]:
    body = LOOPS[program.loop](program)
    before = [FREEZES_LATER] if program.freezing == "later" else []
    after = [AFTER[program.aside]] if program.aside in AFTER else []
    if program.between in EVALUATIONS:
        after.append(EVALUATIONS[program.between].format(each=_in(EACH), plain=EACH).rstrip())
    return before + body + after


def _zero(program: Program, when: str, optimizer: str = "optimizer", model: str = "model") -> list[str]:
    return [ZEROS[program.zero].format(o=optimizer, m=model)] if (program.zero == "start") == (when == "start") else []


def _batches(program: Program, body: list[str], *models: str) -> list[str]:
    """The loop over a step's microbatches."""
    if program.k > 1 and program.accumulate == "no_sync":
        contexts = ", ".join(f"nullcontext() if batch.last else {model}.no_sync()" for model in models or ("model",))
        body = [f"with {contexts}:", *map(_in, body)]
    return ["for batch in batches(step):", *map(_in, body)]


def _update(program: Program, optimizer: str = "optimizer") -> list[str]:
    lines = {
        "nothing": [],
        "ours": ["observe(model.clip_grad_norm_(0.5))"],
        "infinity": ["observe(model.clip_grad_norm_(0.05, norm_type=float('inf')))"],
        "torch": ["observe(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))"],
        "value": ["torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)"],
    }[program.clip]
    if program.aside == "reads":
        lines = ["observe(sum(p.grad.norm() for p in model.parameters() if p.grad is not None))", *lines]
    if program.aside in ("scaler", "scaler_off"):
        return [*lines, f"scaler.step({optimizer})", "scaler.update()"]
    return [*lines, f"{optimizer}.step()"]


def _forward(program: Program) -> list[str]:
    lines = ["out = model(batch)"]
    if program.between == "interrupted":
        lines += ["with torch.no_grad():", "    observe(loss_of(model(batch.other), batch.other), batch)"]
    return lines


def _loss(program: Program) -> list[str]:
    lines = ["loss = loss_of(out, batch)", "observe(loss, batch)"]
    if program.aside == "penalty":
        lines.append("loss = loss + 0.01 * sum(p.square().sum() for p in model.parameters())")
    return lines


def _plain(program: Program) -> list[str]:
    backward = "(loss * batch.weight).backward()"
    if program.aside in ("scaler", "scaler_off"):
        backward = "scaler.scale(loss * batch.weight).backward()"
    each = [*_forward(program), *_loss(program), backward]
    if program.aside == "retries":  # a batch that is given up after its forward
        each = ["loss_of(model(batch.other), batch.other)", *each]
    return [*_zero(program, "start"), *_batches(program, each), *_update(program), *_zero(program, "end")]


def _two_forwards(program: Program) -> list[str]:
    each = [*_forward(program), "again = model(batch.other)", *_loss(program)]
    each.append("((loss + loss_of(again, batch.other)) * batch.weight).backward()")
    return [*_zero(program, "start"), *_batches(program, each), *_update(program), *_zero(program, "end")]


def _two_losses(program: Program) -> list[str]:
    each = [*_forward(program), *_loss(program), "with model.no_sync():"]
    each += ["    (loss * batch.weight).backward(retain_graph=True)"]
    each += ["(logits_of(out).square().mean() * batch.weight).backward()"]
    return [*_zero(program, "start"), *_batches(program, each), *_update(program), *_zero(program, "end")]


def _closure(program: Program) -> list[str]:
    each = [*_forward(program), *_loss(program), "(loss * batch.weight).backward()"]
    *clip, step = _update(program)
    body = [ZEROS[program.zero].format(o="optimizer", m="model"), *_batches(program, each), *clip, "return loss"]
    return ["def closure():", *map(_in, body), step.replace("step()", "step(closure)")]


def _two_optimizers(program: Program) -> list[str]:
    each = [*_forward(program), *_loss(program), "(loss * batch.weight).backward()"]
    zeros = ["optimizer.zero_grad()", "second.zero_grad()"]
    ends = program.zero == "end"
    return [*([] if ends else zeros), *_batches(program, each), "optimizer.step()", "second.step()",
            *(zeros if ends else [])]  # fmt: skip


def _in_turns(program: Program) -> list[str]:
    """One optimizer in even steps, the other in odd ones; a phase begins with zero_grad of what it steps."""
    each = [*_forward(program), *_loss(program), "(loss * batch.weight).backward()"]
    return [
        "mine = second if step % 2 else optimizer",
        "mine.zero_grad()",
        *_batches(program, each),
        "mine.step()",
    ]


def _gan(program: Program) -> list[str]:
    """The phases of torch's DCGAN tutorial: a critic of two sharded models, then the generator through it."""
    judged = [
        *_forward(program),
        "loss = critic(logits_of(out).detach(), batch).mean() - critic(right(batch), batch).mean()",
        "observe(loss, batch)",
        "(loss * batch.weight).backward()",
    ]
    made = ["out = model(batch)", "loss = loss_of(out, batch) - critic(logits_of(out), batch).mean()"]
    made += ["observe(loss, batch)", "(loss * batch.weight).backward()"]
    return [
        "critic.zero_grad()",
        *_batches(program, judged, "critic"),
        "second.step()",
        "model.zero_grad()",
        *_batches(program, made, "model", "critic"),
        "optimizer.step()",
    ]


LOOPS = {
    "plain": _plain,
    "two_forwards": _two_forwards,
    "two_losses": _two_losses,
    "closure": _closure,
    "two_optimizers": _two_optimizers,
    "in_turns": _in_turns,
    "gan": _gan,
}
