"""A DTensor sharded over its columns (row-wise tensor parallelism) cannot be wrapped.

Needs 2 GPUs; without a GPU it runs on gloo. Exits 1 where the bug shows, 0 where not.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron_fsdp import fully_shard_model
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def run(rank, world, path, bug):
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu":
        import cpu_stand_in  # noqa: F401
    else:
        torch.cuda.set_device(device)
    torch.set_default_device(device)
    backend = "gloo" if device.type == "cpu" else "nccl"
    dist.init_process_group(backend, init_method=f"file://{path}", rank=rank, world_size=world)
    mesh = dist.init_device_mesh(device.type, (1, world), mesh_dim_names=("dp", "tp"))
    where = {"device_mesh": mesh, "dp_shard_dim": "dp", "tp_dim": "tp", "device": device}
    for style in (ColwiseParallel(), RowwiseParallel()):
        module = parallelize_module(torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False)), mesh["tp"], {"0": style})
        try:
            fully_shard_model(module, fsdp_unit_modules=[torch.nn.Linear], **where)
            print(f"rank {rank}, {type(style).__name__}: built", flush=True)
        except (AssertionError, RuntimeError) as error:
            print(f"rank {rank}, {type(style).__name__}: {type(error).__name__}: {str(error)[:110]}", flush=True)
            bug.fill_(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    bug = torch.zeros(1).share_memory_()
    mp.spawn(run, args=(2, f"{tempfile.mkdtemp()}/store", bug), nprocs=2)
    sys.exit(int(bug.item()))
