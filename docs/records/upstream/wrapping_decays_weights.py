"""fully_shard_optimizer changes weights and momentum: it takes a step, with weight decay.

Needs 2 GPUs; without a GPU it runs on gloo. Exits 1 where the bug shows, 0 where not.
"""

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
    model = fully_shard_model(torch.nn.Sequential(torch.nn.Linear(8, 8)), fsdp_unit_modules=[torch.nn.Linear], **where)
    weights = [weight.to_local() for weight in model.module.parameters()]
    before = [weight.detach().clone() for weight in weights]
    fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1))
    ratio = (torch.cat([w.flatten() for w in weights]).norm() / torch.cat([w.flatten() for w in before]).norm()).item()
    print(f"rank {rank}: norm of the weights after / before wrapping the optimizer = {ratio:.6f}", flush=True)
    sgd = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9, weight_decay=0.1))
    momentum = max(state["momentum_buffer"].to_local().abs().max().item() for state in sgd.state.values())
    print(f"rank {rank}: largest entry of SGD's momentum before the first step = {momentum:.2e}", flush=True)
    if ratio != 1.0 or momentum != 0.0:
        bug.fill_(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    bug = torch.zeros(1).share_memory_()
    mp.spawn(run, args=(2, f"{tempfile.mkdtemp()}/store", bug), nprocs=2)
    sys.exit(int(bug.item()))
