"""DeepSpeed 0.19.8, ZeRO-3: a weight no microbatch of a step needs is updated by its last gradient. Exit 1: it shows.

python docs/records/upstream/deepspeed_stale_gradient.py
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist

os.environ |= {"LOCAL_RANK": "0", "LOCAL_SIZE": "1", "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo"}
import deepspeed


class TwoHeads(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, with_b: bool) -> torch.Tensor:
        hidden = self.body(x)
        return (self.a(hidden) + (self.b(hidden) if with_b else 0)).sum()


def moved_by(stage: int) -> float:
    """How far head b moves in a step that does not use it."""
    torch.manual_seed(0)
    model = TwoHeads()
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True, "zero_optimization": zero}
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=sgd, config=config)
    seen = []
    for with_b in (True, False):
        engine.backward(engine(torch.ones(1, 4), with_b))
        engine.step()
        with deepspeed.runtime.zero.GatheredParameters([model.b.weight], enabled=stage == 3):
            seen.append(model.b.weight.detach().clone())
    return (seen[1] - seen[0]).abs().max().item()


deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # do not compile anything for this
with tempfile.TemporaryDirectory() as folder:
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
    moved = {stage: moved_by(stage) for stage in (1, 2, 3)}
    print("head b moves in the step without it, by ZeRO stage:", moved)
    dist.destroy_process_group()
sys.exit(1 if moved[3] else 0)
