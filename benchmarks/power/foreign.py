"""The power of verdicts on loops that are not this harness's: faults put into them from outside, and clean pairs.

    python benchmarks/power/foreign.py train --root DIR
    python benchmarks/power/foreign.py judge --root DIR     writes data/power_foreign.csv
    python benchmarks/power/foreign.py table

The loops are those of tests/capture/loops.py (FSDP2, FSDP1 and DDP by hand, and for clean pairs more), written with
torch alone and watched by `harness.capture` as by default: tensors whole at steps 1 and 10 of 12, sketches at all. A
fault is a change of what passes by: what is fed, an output or its gradient, a gradient before the update, an
optimizer's state, a weight. It acts from step `LATE` on, or in step `ONCE` alone; in the data's digest nothing shows.
Each faulty run is held against its twin (the same loop without it), another parallelism, and one process.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from benchmarks.pages.tables import markdown_table
from benchmarks.power.class_runs import least, share
from harness.capture import watch
from harness.capture.shards import plain_name
from harness.parity.compare import compare
from tests.capture import loops
from tests.support.spawn import run_ranks

DATA = Path(__file__).resolve().parents[1] / "data" / "power_foreign.csv"
LATE, ONCE, STEPS = 6, 8, 12
LOOPS = ("fsdp2", "fsdp1", "ddp")
CONTROLS = {"fsdp2": ("ddp", "single"), "fsdp1": ("fsdp2", "single"), "ddp": ("fsdp2", "single")}
"""Beside the twin."""
TRAININGS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "hot": {"lr": 0.06},
    "sgd": {"kind": "SGD", "lr": 0.1},
    "clipped": {"clip": 0.1},
    "accumulated": {"microbatches": 2},
    "long": {"steps": 40},
}
CLEAN = ("single", "ddp", "fsdp2", "hsdp", "fsdp2_tp", "ours", "fsdp1", "fsdp1_flat")
NOT_IN = {"clipped": ("fsdp2_tp",)}
"""torch cannot clip over two meshes."""
SEEDS = {"adamw": (1, 2, 9), "hot": (3, 4, 10), "sgd": (5, 11), "clipped": (6,), "accumulated": (7,), "long": (8, 12)}


@dataclass
class Site:
    """Where a fault acts: the program's own objects, in a step of it."""

    rank: int
    model: nn.Module
    net: nn.Module
    optimizer: Any
    step: int = 0

    def param(self, end: str) -> Any:
        found = {plain_name(name): param for name, param in self.model.named_parameters()}
        return next(param for name, param in found.items() if name.endswith(plain_name(end)))

    def rows(self, end: str) -> Tensor:
        """This rank's part of a weight."""
        param = self.param(end)
        return getattr(param, "_local_tensor", param.data)

    def gradient(self, end: str) -> Tensor:
        grad = self.param(end).grad
        empty = torch.empty(0)
        return empty if grad is None else getattr(grad, "_local_tensor", grad)

    def state(self, end: str, entry: str) -> Tensor:
        found = self.optimizer.state.get(self.param(end), {}).get(entry, torch.empty(0))  # FSDP1: of no rows, no state
        return getattr(found, "_local_tensor", found)


@dataclass(frozen=True)
class Fault:
    name: str
    does: str
    stage: str
    point: str
    """`feed`, `loss`, `gradient`, `rule` (before the update), `updated` (after it), `between` (two steps), `output`
    of a module, or `backward`, the gradient of that."""
    change: Callable[..., Any]
    path: str = ""
    """Of the module."""


UP, DOWN, HEAD, WORDS = "blocks.0.up.weight", "blocks.1.down.weight", "head.weight", "embedding.weight"


def _on_rank(rank: int, change: Callable[[Site], Any]) -> Callable[[Site], Any]:
    return lambda site: change(site) if site.rank == rank else None


def _put(tensor: Tensor, value: Tensor) -> None:
    tensor.copy_(value)


def _narrow(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).to(x.dtype)


def _each(of: Callable[[Site, str], Tensor], change: Callable[[Tensor], Any]) -> Callable[[Site], None]:
    """Change the gradients, or weights, of all parameters."""

    def all_of(site: Site) -> None:
        for name, _ in site.model.named_parameters():
            change(of(site, name))

    return all_of


def _groups(**values: float) -> Callable[[Site], None]:
    """Other constants of the rule, in one update."""
    return lambda site: [group.update(values) for group in site.optimizer.param_groups] and None


def _table(stage: str, point: str, *rows: tuple[Any, ...]) -> list[Fault]:
    return [Fault(name, does, stage, point, change, *path) for name, does, change, *path in rows]


FAULTS = [
    *_table(
        "forward",
        "feed",
        ("ids_shifted", "ids are one too large", lambda s, x: (x + 1) % loops.WORDS),
        ("row_repeated", "a row is fed twice, and another not", lambda s, x: torch.cat([x[:1], x[:-1]])),
        ("row_reversed", "a sequence is read backwards", lambda s, x: torch.cat([x[:1].flip(1), x[1:]])),
        ("a_token_wrong", "one token is another", lambda s, x: x.clone().index_put_(
            (torch.tensor(0), torch.tensor(3)), (x[0, 3] + 7) % loops.WORDS)),
        ("first_ranks_rows", "every rank is fed rows in another order of tokens", lambda s, x: x.roll(1, 1)),
    ),
    *_table(
        "forward",
        "loss",
        ("loss_of_half", "the last positions have no loss", lambda s, logits, y: (logits[:, :4], y[:, :4])),
        ("z_loss", "logits are 1 % larger in the loss", lambda s, logits, y: (1.01 * logits, y)),
        ("targets_late", "targets are those of the position before", lambda s, logits, y: (logits, y.roll(1, 1))),
        ("narrow_logits", "logits have 8 bits", lambda s, logits, y: (_narrow(logits), y)),
    ),
    *_table(
        "forward",
        "output",
        ("branch_scaled", "a branch is 1 % larger", lambda s, y: 1.01 * y, "blocks.1.down"),
        ("branch_narrow", "a branch has 8 bits", lambda s, y: _narrow(y), "blocks.0.up"),
        ("unit_lost", "a unit of a layer is zero", lambda s, y: y * (torch.arange(y.shape[-1]) != 5), "blocks.0.up"),
        ("norm_off", "a norm has an offset", lambda s, y: y + 0.01, "blocks.1.norm"),
        ("saturated", "a branch saturates", lambda s, y: y.clamp(max=y.detach().max().item() / 2), "blocks.1.up"),
        ("positions_mixed", "a position sees the next", lambda s, y: y.lerp(y.roll(-1, 1), 0.05), "embedding"),
        ("rank_drops_out", "one rank drops a tenth", lambda s, y: y * (
            (torch.arange(y.numel()).view_as(y) * 7919 % 10 > 0) if s.rank else torch.ones(())), "blocks.0.down"),
    ),
    *_table(
        "gradient",
        "backward",
        ("halved_back", "a branch's gradient is halved", lambda s, g: g / 2, "blocks.1.down"),
        ("turned_back", "a branch's gradient has the other sign", lambda s, g: -g, "blocks.0.up"),
        ("narrow_back", "a backward has 8 bits", lambda s, g: _narrow(g), "blocks.1.norm"),
        ("row_lost_back", "a row has no gradient", lambda s, g: torch.cat([g[:-1], 0 * g[-1:]]), "blocks.0.down"),
        ("cut_off_back", "large gradients are cut off", lambda s, g: g.clamp(*(
            float(sign * g.abs().max() / 2) for sign in (-1, 1))), "blocks.1.up"),
    ),
    *_table(
        "reduction",
        "gradient",
        ("bucket_longer", "a gradient is 1 % longer", lambda s: s.gradient(UP).mul_(1.01)),
        ("bucket_lost", "a gradient is zero", lambda s: s.gradient(DOWN).zero_()),
        ("bucket_narrow", "a gradient has 8 bits", lambda s: _put(s.gradient(DOWN), _narrow(s.gradient(DOWN)))),
        ("bucket_rolled", "a gradient lies an element further on", lambda s: _put(
            s.gradient(UP), s.gradient(UP).roll(1))),
        ("element_lost", "an element of a gradient is zero", lambda s: s.gradient(HEAD).view(-1)[:1].zero_()),
        ("all_doubled", "gradients are added up instead of averaged", _each(Site.gradient, lambda g: g.mul_(2))),
        ("all_narrow", "all gradients have 8 bits", _each(Site.gradient, lambda g: _put(g, _narrow(g)))),
        ("one_rank_longer", "one rank's part is 2 % longer", _on_rank(1, lambda s: s.gradient(HEAD).mul_(1.02))),
        ("noise_added", "1 % of noise is added", lambda s: s.gradient(WORDS).mul_(
            1 + 0.01 * torch.sin(torch.arange(s.gradient(WORDS).numel()).view_as(s.gradient(WORDS)) * 12.9898))),
        ("small_dropped", "small elements are dropped", lambda s: (g := s.gradient(UP)).mul_(
            g.abs() > (g.abs().median() if g.numel() else 0.0))),
    ),
    *_table(
        "optimizer",
        "rule",
        ("no_decay", "weights do not decay", _groups(weight_decay=0.0)),
        ("first_beta", "Adam's first beta is 0.8", _groups(betas=(0.8, 0.999))),
        ("epsilon", "Adam's epsilon is 1e-5", _groups(eps=1e-5)),
        ("moment_zeroed", "a row of momentum is zero", lambda s: s.state(UP, "exp_avg").view(-1)[:16].zero_()),
        ("moments_swapped_signs", "momentum changes its sign", lambda s: s.state(HEAD, "exp_avg").neg_()),
        ("second_forgets", "a second moment is halved", lambda s: s.state(DOWN, "exp_avg_sq").mul_(0.5)),
        ("count_behind", "a step is not counted in a tensor", lambda s: s.state(DOWN, "step").sub_(1)),
    ),
    *_table(
        "optimizer",
        "updated",
        ("row_not_updated", "a row keeps its old weights", lambda s: s.rows(UP).view(-1)[:8].mul_(1 + 1e-3)),
        ("update_capped", "an update is 1 % too large", lambda s: s.rows(HEAD).mul_(1 + 1e-4)),
        ("weights_narrow", "updated weights have 8 bits", lambda s: _put(s.rows(DOWN), _narrow(s.rows(DOWN)))),
    ),
    *_table(
        "weights",
        "between",
        ("sign_changed", "a weight changes its sign between steps", lambda s: s.rows(UP).view(-1)[:1].neg_()),
        ("weights_grown", "weights grow by 1e-4 between steps", lambda s: s.rows(DOWN).mul_(1 + 1e-4)),
        ("one_rank_grown", "one rank's weights grow", _on_rank(1, lambda s: s.rows(HEAD).mul_(1 + 1e-3))),
        ("rows_exchanged", "halves change places", lambda s: _put(s.rows(HEAD), s.rows(HEAD).roll(16))),
    ),
]  # fmt: skip


def train(rank: int, layout: str, path: Path, training: dict[str, Any], seed: int, name: str, acts: str) -> None:
    """Train, watched, with a fault or none (""). Args: acts: "late" or "once"."""
    chosen = {**loops.LAYOUTS, **loops.FLAT}[layout]
    steps, microbatches = training.get("steps", STEPS), training.get("microbatches", 1)
    torch.manual_seed(0)
    net = loops.Net()
    fault = next((each for each in FAULTS if each.name == name), None)
    site = Site(rank, net, net, None)

    def due(point: str) -> bool:
        right = site.step >= LATE if acts == "late" else site.step == ONCE
        return fault is not None and right and fault.point == point

    if fault is not None and fault.path:
        net.get_submodule(fault.path).register_forward_hook(partial(_passing, fault, site, due))
    model = chosen.shards(net)
    rule = getattr(torch.optim, training.get("kind", "AdamW"))
    model, optimizer = chosen.finish(model, rule([*model.parameters()], lr=training.get("lr", 1e-3)))
    site.model, site.optimizer = model, optimizer
    run = watch(model, optimizer, path, share=1.0)
    readers = chosen.readers or chosen.ranks
    for site.step, batch in enumerate(loops.batches(steps, seed), start=1):
        rows = batch.chunk(readers)[rank * readers // chosen.ranks]
        total = 0.0
        for part in rows.chunk(microbatches):
            fed = fault.change(site, part) if fault is not None and due("feed") else part
            scores, targets = model(fed[:, :-1]), fed[:, 1:]
            if fault is not None and due("loss"):
                scores, targets = fault.change(site, scores, targets)
            loss = nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten()) / microbatches
            loss.backward()
            total += float(loss.detach())
        _update(site, fault, due, training.get("clip"))
        run.step(loss=total, data=rows)
        if fault is not None and due("between"):
            with torch.no_grad():
                fault.change(site)
    run.close()


def _update(site: Site, fault: Fault | None, due: Callable[[str], bool], clip: float | None) -> None:
    model, optimizer = site.model, site.optimizer
    kept = [dict(group) for group in optimizer.param_groups]
    if fault is not None and (due("gradient") or due("rule")):
        with torch.no_grad():
            fault.change(site)
    if clip is not None:
        clipped = getattr(model, "clip_grad_norm_", None)
        clipped(clip) if clipped is not None else nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    if fault is not None and due("updated"):
        with torch.no_grad():
            fault.change(site)
    for group, before in zip(optimizer.param_groups, kept, strict=True):
        group.update({key: value for key, value in before.items() if key != "params"})
    optimizer.zero_grad()


def _passing(
    fault: Fault, site: Site, due: Callable[[str], bool], module: nn.Module, given: Any, output: Tensor
) -> Any:
    if due("output"):
        return fault.change(site, output)
    if due("backward") and output.requires_grad:
        same = output.view_as(output)
        same.register_hook(lambda gradient: fault.change(site, gradient))
        return same
    return output


# -- the campaign ------------------------------------------------------------------------------------------------------


def runs() -> dict[str, tuple[Any, ...]]:
    """Arguments of `train` behind the path, by the run's name."""
    found: dict[str, tuple[Any, ...]] = {}
    for world, seeds in SEEDS.items():
        for seed in seeds:
            for layout in (each for each in CLEAN if each not in NOT_IN.get(world, ())):
                found[f"{layout}-{world}-{seed}"] = (layout, TRAININGS[world], seed, "", "")
    for fault in FAULTS:
        for layout in LOOPS:
            for acts in ("late", "once"):
                found[f"{layout}-{fault.name}-{acts}"] = (layout, {}, 1, fault.name, acts)
    return found


def make(root: Path) -> None:
    """Make what is not there, 16 runs at once on ranks that are forked for them."""
    waiting = {name: each for name, each in runs().items() if not (root / name / "summary.json").exists()}
    alike: dict[int, list[tuple[Any, ...]]] = {}
    for name, (layout, *rest) in waiting.items():
        shutil.rmtree(root / name, ignore_errors=True)  # of a run that was broken off
        ranks = {**loops.LAYOUTS, **loops.FLAT}[layout].ranks
        alike.setdefault(ranks, []).append((train, (layout, root / name, *rest), {}))
    for ranks, jobs in alike.items():
        for begin in range(0, len(jobs), 16):
            run_ranks(loops.everywhere, ranks, jobs[begin : begin + 16], apart=True)
        print(f"{len(jobs)} runs of {ranks} ranks", flush=True)


def judged(root: Path) -> Iterator[dict[str, object]]:
    names = runs()
    for world, seeds in SEEDS.items():
        for seed in seeds:
            alike = [name for name in names if name.endswith(f"-{world}-{seed}")]
            for arm, control in combinations(alike, 2):
                yield {"kind": "clean", "name": arm, "against": control, "loop": "", "training": world} | told(
                    root / arm, root / control
                )
    for fault in FAULTS:
        for layout in LOOPS:
            for acts in ("late", "once"):
                arm = root / f"{layout}-{fault.name}-{acts}"
                for control in (layout, *CONTROLS[layout]):
                    row = {"kind": acts, "name": fault.name, "loop": layout, "training": "adamw", "stage": fault.stage}
                    found = told(arm, root / f"{control}-adamw-1")
                    yield {**row, "against": "twin" if control == layout else control, **found}


def told(arm: Path, control: Path) -> dict[str, object]:
    verdict = compare(arm, control)
    worst = [each for each in verdict.findings if each.grade.value != "ok"]
    first = next((each for each in worst if f"{each.place}" in verdict.sentence), worst[0] if worst else None)
    return {
        "outcome": verdict.outcome.value,
        "stages": " ".join(stage.value for stage in first.stages) if first else "",
        "sentence": verdict.sentence,
    }


def tables(rows: pd.DataFrame) -> Iterator[str]:
    faulty = rows[rows["kind"] != "clean"]
    faulty = faulty.assign(
        found=faulty["outcome"].isin(("DIFFERENT", "UNDECIDED")),
        placed=[stage in str(stages).split() for stage, stages in zip(faulty["stage"], faulty["stages"], strict=True)],
    )
    for by in (["kind", "loop"], ["kind", "against"], ["kind", "stage"]):
        lines = [
            (*name, share(own["found"]), least(own["found"]), (own["outcome"] == "DIFFERENT").sum(),
             share(own[own["found"]]["placed"]))
            for name, own in faulty.groupby(by, sort=False)
        ]  # fmt: skip
        yield markdown_table([*by, "found", "at least", "DIFFERENT", "stage right or stated"], lines)
    missed = faulty[~faulty["found"]][["kind", "name", "loop", "against", "outcome"]]
    yield markdown_table([*missed.columns], missed.itertuples(index=False))
    outcomes = ("EQUAL", "EQUIVALENT", "UNDECIDED", "DIFFERENT", "NOT_COMPARABLE")
    clean = rows[rows["kind"] == "clean"].groupby("training", sort=False)
    counts = [(name, len(own), *(own["outcome"].eq(each).sum() for each in outcomes)) for name, own in clean]
    yield markdown_table(["clean pairs", "all", *outcomes], counts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("verb", choices=("train", "judge", "table"))
    parser.add_argument("--root", type=Path, default=Path("runs/foreign"), help="where runs are (default: %(default)s)")
    chosen = parser.parse_args()
    if chosen.verb == "train":
        make(chosen.root)
    elif chosen.verb == "judge":
        pd.DataFrame(judged(chosen.root)).drop(columns="sentence").to_csv(DATA, index=False)
    else:
        print("\n\n".join(tables(pd.read_csv(DATA, keep_default_na=False))))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
