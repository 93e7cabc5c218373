"""overlap_grad_reduce=False trains wrongly with optim.

Needs 2 GPUs; without a GPU it runs on gloo. Exits 1 where the bug shows, 0 where not.
"""

import copy
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron_fsdp import fully_shard_model, fully_shard_optimizer


def train(net, optimizer, ranks):
    """Losses of four steps on the data of these ranks."""
    losses = []
    for _ in range(4):
        for rank in ranks:
            loss = net((torch.arange(32.0).view(4, 8) + rank).sin()).square().mean()
            (loss / len(ranks)).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


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

    for strategy in ("optim",):
        for overlaps in (True, False):
            torch.manual_seed(0)
            plain = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
            options = {"fsdp_unit_modules": [torch.nn.Linear], "zero_dp_strategy": strategy}
            model = fully_shard_model(copy.deepcopy(plain), overlap_grad_reduce=overlaps, **options, **where)
            optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
            want = train(plain, torch.optim.SGD(plain.parameters(), lr=0.5), range(world))[rank::world]
            error = max(abs(a - b) for a, b in zip(train(model, optimizer, [rank]), want, strict=True))
            if rank == 0:
                print(f"{strategy}, overlap_grad_reduce={overlaps}: losses off by {error:.1e}", flush=True)
            if error > 1e-4:
                bug.fill_(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    bug = torch.zeros(1).share_memory_()
    mp.spawn(run, args=(2, f"{tempfile.mkdtemp()}/store", bug), nprocs=2)
    sys.exit(int(bug.item()))
