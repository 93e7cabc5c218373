"""`import harness.fsdp` and one training leave nothing behind in the process but what the placement needs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import gc, importlib, json, resource, signal, sys, threading, time, warnings
import torch, torch.distributed as dist
from torch import nn
import torch.distributed.checkpoint.state_dict, torch.distributed.tensor, torch.testing, torch.nn.utils.clip_grad
import torch.distributed.fsdp, torch.autograd.graph, torch.distributed.tensor.experimental, torch.amp, torch.func
import torch._dynamo

rank, store, habit = int(sys.argv[1]), sys.argv[2], sys.argv[3]
MODULES = (
    "torch torch.nn torch.nn.modules.module torch.nn.modules.rnn torch.nn.functional torch.nn.utils.clip_grad "
    "torch.amp torch.autograd torch.autograd.graph torch.optim torch.optim.optimizer torch.optim.adamw "
    "torch.utils._foreach_utils torch.distributed torch.distributed.distributed_c10d "
    "torch.distributed.checkpoint torch.distributed.tensor torch.distributed.checkpoint.state_dict "
    "torch.distributed.tensor._api torch.distributed.tensor._dispatch torch.distributed.tensor.placement_types "
    "torch.distributed.tensor._utils torch.serialization torch.overrides "
).split()
CLASSES = (
    torch.Tensor, nn.Parameter, nn.Module, nn.RNNBase, nn.Linear, torch.optim.Optimizer, torch.optim.AdamW,
    torch.distributed.tensor.DTensor, torch.distributed.tensor.Shard, torch.distributed.tensor.Replicate,
    torch.distributed.tensor.placement_types.Placement, torch.distributed.device_mesh.DeviceMesh, dist.ProcessGroup,
    type(torch.distributed.tensor.DTensor._op_dispatcher), torch.UntypedStorage, torch.amp.GradScaler,
)


def contents(value):
    if isinstance(value, (list, set, frozenset)):
        return [id(value), len(value)]
    if isinstance(value, dict):
        return [id(value), len(value)]
    if isinstance(value, (bool, int, float, str, type(None))):
        return repr(value)
    return id(value)


def state():
    found = {}
    for name in MODULES:
        found |= {f"{name}.{key}": contents(value) for key, value in vars(sys.modules[name]).items()}
    for each in CLASSES:
        found |= {f"{each.__qualname__}.{key}": contents(value) for key, value in vars(each).items()}
    handlers = torch.distributed.tensor.DTensor._op_dispatcher._custom_op_handlers
    found["custom handlers"] = len(handlers)
    found["safe globals"] = sorted(each.__qualname__ for each in torch.serialization.get_safe_globals())
    found["threads"] = sorted(each.name for each in threading.enumerate())
    found["signals"] = [repr(signal.getsignal(each)) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    found["python"] = [id(sys.excepthook), id(threading.excepthook), len(warnings.filters), len(gc.callbacks)]
    found["finders"] = [len(sys.meta_path), len(sys.path_hooks), sys.getrecursionlimit(), gc.get_threshold()]
    found["limits"] = [resource.getrlimit(each) for each in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)]
    found["modes"] = [
        torch.get_num_threads(), torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled(),
        str(torch.get_default_dtype()), torch.is_autocast_enabled("cpu"), torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(), torch._C._is_torch_function_enabled(),
    ]
    return found


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def train():
    from harness.fsdp import fully_shard
    torch.manual_seed(0)
    module = nn.Sequential(Block(), Block(), nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    model, optimizer = fully_shard(module, optimizer, fsdp_unit_modules=[Block], zero_dp_strategy=3)
    for step in range(3):
        model(torch.full((2, 6), 1.0 + rank + step)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.state_dict(), optimizer.state_dict()
    with model.unsharded():
        pass
    model.close()


def plain():
    # what torch itself sets up at its first use is no business of ours
    module = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    from torch.distributed.tensor import DTensor, Shard
    DTensor.from_local(torch.ones(2), mesh, [Shard(0)]).sum().full_tensor()


dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
plain()
gc.collect()
before = state()
train()
if habit == "hooks":
    torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
elif habit == "patches":
    nn.Module.zero_grad = lambda self, set_to_none=True: None
elif habit == "threads":
    threading.Thread(target=threading.Event().wait, daemon=True, name="ours").start()
gc.collect()
until = time.monotonic() + 5
while len(threading.enumerate()) > len(before["threads"]) and time.monotonic() < until:  # closed, and about to end
    time.sleep(0.05)
after = state()
dist.barrier()
changed = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
print(json.dumps({key: [str(before.get(key)), str(after.get(key))] for key in changed}))
"""
NEEDED = {
    "safe globals",  # torch.load reads what was saved of the placement
    "torch.optim.optimizer._foreach_supported_types",
    "torch.utils._foreach_utils._foreach_supported_types",
    "torch.distributed.tensor._optim_foreach_supported_types",
    "torch.distributed.tensor._util_foreach_supported_types",
}
"""Lists of torch's, the last two under their other names, that know the placement's classes."""


def changed(folder: Path, habit: str = "") -> list[set[str]]:
    """Per rank, which state of the process is another one after a training."""
    command = [sys.executable, "-c", PROGRAM]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(folder / f"store{habit}"), habit],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [each.communicate(timeout=300) for each in ranks]
    assert all(each.returncode == 0 for each in ranks), told[0][1] + told[1][1]
    found = [json.loads(out.splitlines()[-1]) for out, _ in told]
    print(found)
    return [set(each) for each in found]


def test_a_training_leaves_nothing_behind_but_what_the_placement_needs(tmp_path: Path) -> None:
    for found in changed(tmp_path):
        assert found <= NEEDED, found - NEEDED


@pytest.mark.parametrize("habit", ["hooks", "patches", "threads"])
def test_what_is_left_behind_is_found(habit: str, tmp_path: Path) -> None:
    assert all(found - NEEDED for found in changed(tmp_path, habit))
