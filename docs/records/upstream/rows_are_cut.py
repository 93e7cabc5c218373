"""A shard may end inside a row of a small parameter: the model then cannot be wrapped.

Needs 2 GPUs; without a GPU it runs on gloo. Exits 1 where the bug shows, 0 where not.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron_fsdp import fully_shard_model


class Unit(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = torch.nn.Parameter(torch.zeros(3, 30))
        self.small = torch.nn.Parameter(torch.zeros(5, 8))  # fewer elements than lcm(30, 8) = 120


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

    unit = Unit()
    try:
        fully_shard_model(torch.nn.Sequential(unit), fsdp_unit_modules=[Unit], zero_dp_strategy="optim", **where)
        print(f"rank {rank}: built", flush=True)
    except RuntimeError as error:
        print(f"rank {rank}: RuntimeError: {error}", flush=True)
        bug.fill_(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    bug = torch.zeros(1).share_memory_()
    mp.spawn(run, args=(2, f"{tempfile.mkdtemp()}/store", bug), nprocs=2)
    sys.exit(int(bug.item()))
