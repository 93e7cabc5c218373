"""What follows from nccl_ub and sharp: what forces what, the signature, and this machine's allocator settings."""

from __future__ import annotations

from harness.store.identity import run_name, signature
from tests.support.composing import compose


def test_every_choice_that_can_change_a_number_is_another_run() -> None:
    requests = ["", "nccl_ub=auto", "nccl_ub=manual", "nccl_ub=auto nccl_ub.symmetric=false"]
    requests += ["sharp=dp", "sharp=dp sharp.nvlink=false"]
    assert len({signature(compose(request.split()).config) for request in requests}) == len(requests)
    on_cuda = ["cluster=slurm", "cluster.device=cuda", "cluster.gpus_per_node=2", "launch.dry_run=true"]
    left, off = (signature(compose([f"sharp={chosen}", *on_cuda]).config) for chosen in ("default", "none"))
    assert left != off
    same = ["", "launch.nccl_log=choices", "cluster=slurm cluster.sharp_network=x launch.dry_run=true"]
    same += ["sharp=default", "sharp=none"]  # without NCCL nothing is left to it: what was stored before is found
    assert len({signature(compose(request.split()).config) for request in same}) == 1


def test_a_run_is_named_after_what_it_asks_of_nccl() -> None:
    name = run_name(compose(["nccl_ub=manual", "sharp=dp"]).config)
    assert "ub_manual-sharp_dp" in name
    plain = compose([]).config
    old = {key: value for key, value in plain.items() if key not in ("nccl_ub", "sharp")}
    assert run_name(old) == run_name(plain)  # runs from before these groups keep their names
