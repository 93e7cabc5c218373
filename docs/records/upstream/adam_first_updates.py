"""Adam's first updates are too small: its step count starts at 1.

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

    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(8, 8))
    model = fully_shard_model(copy.deepcopy(plain), fsdp_unit_modules=[torch.nn.Linear], **where)
    before = plain[0].weight.detach().clone()
    options = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.0}
    reference = torch.optim.Adam(plain.parameters(), **options)
    optimizer = fully_shard_optimizer(torch.optim.Adam(model.parameters(), **options))
    x = torch.randn(4, 8)  # the same on all ranks, so their mean is what plain torch has
    for step in (1, 2, 3):
        for net, update in ((plain, reference), (model, optimizer)):
            net(x).square().mean().backward()
            update.step()
            update.zero_grad()
        want = plain[0].weight.detach() - before
        local = dict(model.module.named_parameters())["0.weight"].to_local()
        rows = local.shape[0]
        start = 0 if rank == 0 else before.shape[0] - rows
        got = local.detach() - before[start : start + rows]
        ratio = (got.norm() / want[start : start + rows].norm()).item()
        print(f"rank {rank} step {step}: distance moved, megatron-fsdp / torch = {ratio:.4f}", flush=True)
        if abs(ratio - 1) > 1e-3:
            bug.fill_(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    bug = torch.zeros(1).share_memory_()
    mp.spawn(run, args=(2, f"{tempfile.mkdtemp()}/store", bug), nprocs=2)
    sys.exit(int(bug.item()))
