"""Without auto-sync, no_shard and optim step on gradients of one rank until no_sync() was left once.

Needs 2 GPUs; without a GPU it runs on gloo. Exits 1 where the bug shows, 0 where not.
"""

import copy
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron_fsdp import fully_shard_model, fully_shard_optimizer


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

    for strategy in ("no_shard", "optim", "optim_grads"):
        torch.manual_seed(0)
        plain = torch.nn.Sequential(torch.nn.Linear(8, 8))
        options = {"fsdp_unit_modules": [torch.nn.Linear], "zero_dp_strategy": strategy}
        model = fully_shard_model(copy.deepcopy(plain), sync_model_each_microbatch=False, **options, **where)
        optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
        reference = torch.optim.SGD(plain.parameters(), lr=0.5)
        xs = [(torch.arange(32.0).view(4, 8) + r).sin() for r in range(world)]
        model(xs[rank]).square().mean().backward()  # one microbatch a step: there is none to leave out
        optimizer.step()
        (sum(plain(x).square().mean() for x in xs) / world).backward()
        reference.step()
        error = (model(xs[0]) - plain(xs[0])).abs().max().item()
        print(f"rank {rank}, {strategy}: output after a step differs from torch's by {error:.1e}", flush=True)
        if error > 1e-5:
            bug.fill_(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    bug = torch.zeros(1).share_memory_()
    mp.spawn(run, args=(2, f"{tempfile.mkdtemp()}/store", bug), nprocs=2)
    sys.exit(int(bug.item()))
