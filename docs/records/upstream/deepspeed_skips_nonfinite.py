"""DeepSpeed 0.19.8, ZeRO-1 in fp32 without loss scaling: a step with a NaN gradient leaves no trace. Exit 1: it shows.

python docs/records/upstream/deepspeed_skips_nonfinite.py
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist

os.environ |= {"LOCAL_RANK": "0", "LOCAL_SIZE": "1", "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo"}
import deepspeed

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # do not compile anything for this
with tempfile.TemporaryDirectory() as folder:
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
    model = torch.nn.Linear(4, 4)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.1),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 1},
        },
    )
    before = model.weight.detach().clone()
    loss = engine(torch.full((1, 4), float("nan"))).sum()
    engine.backward(loss)
    engine.step()
    skipped = torch.equal(before, model.weight)
    print(f"loss {loss.item()}, norm {float(engine.get_global_grad_norm())}, weights unchanged: {skipped}")
    print(f"was_step_applied {engine.was_step_applied()}, skipped_steps {engine.skipped_steps}")
    dist.destroy_process_group()
sys.exit(1 if skipped else 0)
