"""Behaviours 38, 39, 40 and 43: state as DTensors, saved and loaded by torch's distributed checkpoint."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import DTensor

from harness.fsdp import ShardedModel, ShardedState, state as states
from harness.fsdp.ragged import RaggedTensor
from harness.fsdp.storage import dtensors
from tests.fsdp.behaviours.lab import ALL, Lab, Mutant, behaviour, not_installed
from tests.fsdp.behaviours.models import Block, Net, seeded
from tests.fsdp.behaviours.subject import NotOffered, Setup, Subject, adamw
from tests.fsdp.checked import patched

LAYOUTS = [(strategy, 1, "no_shard") for strategy in ALL] + [
    (strategy, 2, outer) for strategy in ALL for outer in ("no_shard", "optim")
]
"""Inner strategy, size of the outer axis, what it splits."""
FEW = [(ALL[0], 1, "no_shard"), (ALL[1], 2, "optim"), (ALL[2], 2, "no_shard"), (ALL[3], 2, "optim")]
"""Each strategy and each outer one at least once."""

_rows = dtensors._rows


def _refuse_unless_offered(lab: Lab, name: str) -> None:
    """Before anything is trained: an engine whose state is not looked at here is not to be judged by the way there."""
    if getattr(lab.subject, name) is getattr(Subject, name):
        raise NotOffered("its state is not put to this check")


def _setup(layout: tuple[str, int, str]) -> Setup:
    strategy, outer, outer_strategy = layout
    return Setup(strategy, (Block,), outer=outer, outer_strategy=outer_strategy)


def _as_torch_cuts(self: RaggedTensor, **_: Any) -> Tensor:
    """What `Shard(0)` promises: even chunks in rank order."""
    group = self.device_mesh.get_group(self.device_mesh.ndim - 1)
    size, place = dist.get_world_size(group), dist.get_rank(group)
    even = torch.zeros(self.shape, dtype=self.dtype).chunk(size)
    found = [torch.zeros_like(each) for each in even] + [even[0][:0]] * (size - len(even))
    mine = found[place]
    rows = min(len(mine), len(self._local_tensor)) if self.shape else 0
    mine[:rows] = self._local_tensor[:rows]
    whole = torch.cat(found)
    dist.all_reduce(whole, group=group)
    return whole.reshape(self.shape)


def _one_row_on(slot: Any, local: Any) -> tuple[int, int]:
    begin, end = _rows(slot, local)
    return (begin + 1, end + 1) if 0 < begin < end < slot.spec.num_rows else (begin, end)


@behaviour(
    "38",
    "state_dict values are DTensors whose chunks are right; put together they are the unsharded model.",
    Mutant(
        "a whole tensor is put together as torch's placement says", patched(RaggedTensor, "full_tensor", _as_torch_cuts)
    ),
    Mutant("chunks in the middle are named one row on", patched(dtensors, "_rows", _one_row_on)),
    ranks=4,
)
def dtensors_gather_rightly(lab: Lab) -> str:
    _refuse_unless_offered(lab, "state_tensors")
    uneven = 0
    for layout in lab.each(LAYOUTS):
        with lab.asking():
            subject = lab.build(seeded(Net, hidden=13), _setup(layout), adamw())
            held = subject.state_tensors()
            right = subject.weights()
            lab.claim(set(held) == set(right), f"{layout}: keys differ by {sorted(set(held) ^ set(right))[:3]}")
            for name in sorted(right.keys() & held.keys()):
                uneven += _claim_tensor(lab, f"{layout}: {name}", held[name], right[name])
            lab.drop(subject)
    return f"whole tensors to the bit, chunks cover each element once; {uneven} tensors lie unevenly{lab.without}"


def _claim_tensor(lab: Lab, told: str, tensor: Tensor, right: Tensor) -> int:
    if not isinstance(tensor, DTensor):
        lab.claim(torch.equal(tensor, right), f"{told} is a plain tensor, and not the whole one")
        return 0
    chunks = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in tensor.__create_chunk_list__()]
    everyone = lab.everywhere(chunks)
    covered = torch.zeros(right.shape)
    for offsets, sizes in {each for of_rank in everyone for each in of_rank}:
        covered[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] += 1
    lab.claim(
        bool((covered == 1).all()), f"{told}: chunks cover elements {int(covered.min())} to {int(covered.max())} times"
    )
    lab.claim(torch.equal(tensor.full_tensor(), right), f"{told}: put together it is another tensor")
    return int(len({sum(s[0] if s else 1 for _, s in of_rank) for of_rank in everyone}) > 1)


def _adopts_nothing(self: ShardedState) -> None:
    """Counters stay as they are."""


_add_optimizers, _held_by = states.add_optimizers, states.held_by


def _first_moments_alone(found: ShardedState, *args: Any) -> None:
    _add_optimizers(found, *args)
    found.tensors = {key: value for key, value in found.tensors.items() if not key.endswith("exp_avg_sq")}


@behaviour(
    "39",
    "Saved and loaded by DCP, parameters and optimizer state have their bits and the next losses are equal.",
    Mutant("step counts are not loaded", patched(ShardedState, "adopt", _adopts_nothing)),
    Mutant("second moments are not saved", patched(states, "add_optimizers", _first_moments_alone)),
    ranks=4,
    shortened=True,
)
def through_dcp(lab: Lab) -> str:
    pairs = [(layout, layout) for layout in (LAYOUTS if lab.whole else FEW)]
    return _journeys(lab, pairs, "losses and weights of the next two steps to the bit")


def _weights_alone(self: ShardedModel, state: ShardedState) -> None:
    state.adopt()
    not_installed(self)
    self.zero_grad()


@behaviour(
    "40",
    "Loaded under another strategy or outer axis it is the same model; another model's shapes raise.",
    Mutant("compute weights are not refreshed", patched(ShardedModel, "adopt_state", _weights_alone)),
    Mutant("chunks in the middle are named one row on", patched(dtensors, "_rows", _one_row_on)),
    ranks=4,
    shortened=True,
)
def on_another_layout(lab: Lab) -> str:
    layouts, turned = (LAYOUTS, 5) if lab.whole else (FEW, 1)
    pairs = list(zip(layouts, [*layouts[turned:], *layouts[:turned]], strict=True))
    told = _journeys(lab, pairs, "weights to the bit, losses of the next two steps within 1e-6")
    with lab.asking(), _folder(lab) as folder:
        small, large = (lab.build(seeded(Net, hidden=h), Setup(units=(Block,)), adamw()) for h in (12, 16))
        lab.train(small, 1)
        lab.train(large, 1)
        dcp_save(small.dcp_state(), checkpoint_id=folder)
        try:
            dcp_load(large.dcp_state(), checkpoint_id=folder)
            lab.claim(False, "another model's shapes are loaded without a word")
        except CheckpointException as error:  # no Exception, to torch
            lab.claim("mismatch" in str(error), f"it says: {str(error)[:90]}")
    return told


@contextmanager
def _folder(lab: Lab) -> Iterator[str]:
    """One folder for all ranks, made by the first."""
    with tempfile.TemporaryDirectory() as own:
        yield lab.everywhere(own)[0]
        dist.barrier()


def _journeys(lab: Lab, pairs: Sequence[Any], says: str) -> str:
    _refuse_unless_offered(lab, "dcp_state")
    for source, target in lab.each(pairs):
        with lab.asking(), _folder(lab) as folder:
            first = lab.build(seeded(Net), _setup(source), adamw())
            lab.train(first, 2)
            _by_dcp(lab, dcp_save, first.dcp_state(), folder)
            dist.barrier()
            weights = first.weights()
            losses = _two_more(lab, first)
            second = lab.build(seeded(Net), _setup(target), adamw())
            lab.train(second, 1)  # other weights, and a state to load into
            state = second.dcp_state()
            _by_dcp(lab, dcp_load, state, folder)
            second.adopt(state)
            loaded = second.weights()
            wrong = [name for name in weights if not torch.equal(weights[name], loaded[name])]
            lab.claim(not wrong, f"{source} -> {target}: loaded weights differ: {wrong[:3]}")
            again = _two_more(lab, second)
            off = max(abs(a - b) for a, b in zip(losses, again, strict=True))
            lab.claim(off <= (0 if source == target else 1e-6), f"{source} -> {target}: next losses off by {off:.1e}")
            lab.drop(first)
            lab.drop(second)
    return says + lab.without


def _by_dcp(lab: Lab, call: Any, state: dict[str, Any], folder: str) -> None:
    try:
        call(state, checkpoint_id=folder)
    except CheckpointException as error:  # on all ranks
        lab.must(False, f"DCP refuses it: {next(iter(error.failures.values()))[0]}"[:200])


def _two_more(lab: Lab, subject: Subject) -> list[float]:
    found = []
    for step in (7, 8):
        found += lab.accumulate(subject, 1, step)
        subject.step()
    return found


class Tiny(Net):
    """With parameters of fewer rows than there are ranks."""

    def __init__(self) -> None:
        super().__init__(units=1)
        self.one, self.pair = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.one) * self.pair.view(-1)


def _only_what_lies_here(*args: Any) -> Iterator[Any]:
    for bucket, slot, *rest in _held_by(*args):
        if bucket.layout.local_slice(slot, bucket.cuts.layout_rank).numel:
            yield bucket, slot, *rest


@behaviour(
    "43",
    "Ranks with empty shards have the same optimizer state keys as all others.",
    Mutant("parameters without a row here are left out", patched(states, "held_by", _only_what_lies_here)),
    ranks=4,
)
def same_keys(lab: Lab) -> str:
    empty = 0
    for strategy in lab.each(ALL):
        with lab.asking():
            subject = lab.build(seeded(Tiny), Setup(strategy, (Block,)), adamw())
            lab.train(subject, 1)
            keys = sorted(subject.dcp_state())
            everyone = lab.everywhere(keys)
            differ = sorted(set().union(*everyone) - set(everyone[0]).intersection(*everyone[1:]))
            lab.claim(all(each == everyone[0] for each in everyone), f"{strategy}: keys differ: {differ[:3]}")
            empty += sum(1 for numel in subject.held().values() if not numel)
            lab.drop(subject)
    total = sum(lab.everywhere(empty))
    lab.claim(total > 0, "no rank has an empty shard: nothing was asked")
    return f"the same keys on {lab.world} ranks, {total} shards of which are empty{lab.without}"
