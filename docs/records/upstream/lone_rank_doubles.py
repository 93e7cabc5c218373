"""A group of one rank adds every microbatch's gradient twice when the wire has a dtype of its own.

Needs 1 GPU; without a GPU it runs on gloo. Exits 1 where the bug shows, 0 where not.
"""

import copy
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model


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
    mesh = dist.init_device_mesh(device.type, (world, 1), mesh_dim_names=("dp", "tp"))
    where = {"device_mesh": mesh, "dp_shard_dim": "dp", "tp_dim": "tp", "device": device}

    policy = MixedPrecisionPolicy(torch.float32, main_grads_dtype=torch.float32, grad_comm_dtype=torch.bfloat16)
    options = {"fsdp_unit_modules": [torch.nn.Linear], "sync_model_each_microbatch": False}
    for strategy in ("optim", "optim_grads", "optim_grads_params"):
        for count in (1, 2, 3):
            plain = torch.nn.Sequential(torch.nn.Linear(8, 8))
            options |= {"zero_dp_strategy": strategy, "mixed_precision_policy": policy}
            ratio = amplified(plain, fully_shard_model(copy.deepcopy(plain), **options, **where), count)
            print(f"{strategy}, {count} microbatches: norm of the gradient / torch's = {ratio:.4f}", flush=True)
            if abs(ratio - 1) > 0.02:
                bug.fill_(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    bug = torch.zeros(1).share_memory_()
    mp.spawn(run, args=(1, f"{tempfile.mkdtemp()}/store", bug), nprocs=1)
    sys.exit(int(bug.item()))
