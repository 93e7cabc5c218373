"""Device of a rank."""

from __future__ import annotations

import os


def device_index(local_rank: int, ranks_per_device: int, visible: int) -> int:
    """CUDA device index of a rank; neighbouring ranks share one.

    Args: visible: devices of this process; a scheduler with one each (srun --gpus-per-task) shows every rank its own as
    number 0.

    Raises `ValueError`: there are too few devices.
    """
    index = 0 if visible == 1 else local_rank // ranks_per_device
    if index < visible:
        return index
    least = -(-(local_rank + 1) // visible) if visible else 1
    raise ValueError(
        f"local rank {local_rank} would compute on CUDA device {index}, and this process sees {visible}"
        f" (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')}); ask for as many devices as ranks,"
        f" or let ranks share them with cluster.ranks_per_device={least}, or set cluster.device=cpu"
    )
