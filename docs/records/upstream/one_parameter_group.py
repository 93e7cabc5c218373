"""fully_shard puts all parameters into one group: per-group settings are lost.

Needs 2 GPUs; without a GPU it runs on gloo. Exits 1 where the bug shows, 0 where not.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron_fsdp import fully_shard


def run(rank, world, path, bug):
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu":
        import cpu_stand_in  # noqa: F401
    else:
        torch.cuda.set_device(device)
    torch.set_default_device(device)
    backend = "gloo" if device.type == "cpu" else "nccl"
    dist.init_process_group(backend, init_method=f"file://{path}", rank=rank, world_size=world)
    mesh = dist.init_device_mesh(device.type, (world, 1), mesh_dim_names=("dp", "tp"))
    where = {"device_mesh": mesh, "dp_shard_dim": "dp", "tp_dim": "tp", "device": device}

    module = torch.nn.Sequential(torch.nn.Linear(8, 8))
    groups = [
        {"params": [module[0].weight], "weight_decay": 0.1, "lr": 1e-3},
        {"params": [module[0].bias], "weight_decay": 0.0, "lr": 1e-4},
    ]
    optimizer = torch.optim.AdamW(groups)
    _, optimizer = fully_shard(module, optimizer, fsdp_unit_modules=[torch.nn.Linear], **where)
    found = [(len(group["params"]), group["weight_decay"], group["lr"]) for group in optimizer.param_groups]
    print(f"rank {rank}: (parameters, weight decay, lr) of each group after wrapping: {found}", flush=True)
    if found != [(1, 0.1, 1e-3), (1, 0.0, 1e-4)]:
        bug.fill_(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    bug = torch.zeros(1).share_memory_()
    mp.spawn(run, args=(2, f"{tempfile.mkdtemp()}/store", bug), nprocs=2)
    sys.exit(int(bug.item()))
