"""HSDP with inner groups of one rank divides old microbatches' gradients again and again.

Needs 2 GPUs; without a GPU it runs on gloo. Exits 1 where the bug shows, 0 where not.
"""

import copy
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron_fsdp import fully_shard_model


def amplified(plain, model, count, mesh=None):
    """Norm of the mean gradient of `count` equal microbatches, over plain torch's."""
    x = torch.arange(32.0).view(4, 8).sin()  # the same on all ranks
    for number in range(count):
        model.is_last_microbatch = number == count - 1
        (model(x).square().mean() / count).backward()
    model.finish_grad_sync()
    square = torch.zeros(())
    for weight in model.module.parameters():
        if weight.grad is not None:
            square += weight.grad.to_local().square().sum()
    dist.all_reduce(square, group=mesh)
    plain(x).square().mean().backward()
    return square.sqrt().item() / torch.cat([w.grad.flatten() for w in plain.parameters()]).norm().item()


def run(rank, world, path, bug):
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu":
        import cpu_stand_in  # noqa: F401
    else:
        torch.cuda.set_device(device)
    torch.set_default_device(device)
    backend = "gloo" if device.type == "cpu" else "nccl"
    dist.init_process_group(backend, init_method=f"file://{path}", rank=rank, world_size=world)
    mesh = dist.init_device_mesh(device.type, (2, 1, 1), mesh_dim_names=("outer", "dp", "tp"))
    options = {"device_mesh": mesh, "dp_shard_dim": "dp", "tp_dim": "tp", "dp_outer_dim": "outer", "device": device}
    options |= {"hybrid_fsdp_group": dist.group.WORLD, "fsdp_unit_modules": [torch.nn.Linear]}

    for count in (1, 2, 3, 4):
        torch.manual_seed(0)
        plain = torch.nn.Sequential(torch.nn.Linear(8, 8))
        options |= {"zero_dp_strategy": "optim_grads", "sync_model_each_microbatch": False}
        ratio = amplified(plain, fully_shard_model(copy.deepcopy(plain), **options), count, mesh["dp"].get_group())
        print(f"rank {rank}, {count} microbatches: norm of the gradient / torch's = {ratio:.4f}", flush=True)
        if abs(ratio - 1) > 1e-4:
            bug.fill_(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    bug = torch.zeros(1).share_memory_()
    mp.spawn(run, args=(2, f"{tempfile.mkdtemp()}/store", bug), nprocs=2)
    sys.exit(int(bug.item()))
