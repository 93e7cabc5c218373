"""A parameter unused on one rank sets the ranks' reductions out of order.

Needs 2 GPUs; without a GPU it runs on gloo. Exits 1 where the bug shows, 0 where not.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron_fsdp import fully_shard_model


class Net(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x, use_branch):
        x = self.layers[0](x)
        if use_branch:  # an expert some ranks route no token to
            x = x + self.layers[1](x).sum()
        return self.layers[2](x)


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

    model = torch.nn.ModuleList([torch.nn.Linear(8, 8), torch.nn.Linear(8, 16), torch.nn.Linear(8, 8)])
    model = fully_shard_model(Net(model), fsdp_unit_modules=[torch.nn.Linear], zero_dp_strategy="no_shard", **where)
    order = []  # sizes instead of traffic: what does not match would hang, or abort in gloo
    dist.all_reduce = lambda gradients, **_: order.append(gradients.numel())
    model(torch.ones(4, 8), use_branch=rank == 0).sum().backward()
    orders = [None] * world
    dist.all_gather_object(orders, order)
    print(f"rank {rank}: elements of each reduction, in order: {order}", flush=True)
    if orders[0] != orders[1]:
        bug.fill_(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    bug = torch.zeros(1).share_memory_()
    mp.spawn(run, args=(2, f"{tempfile.mkdtemp()}/store", bug), nprocs=2)
    sys.exit(int(bug.item()))
