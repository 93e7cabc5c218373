"""What is asked of a cluster that never has it. Texts are sinfo's, of 22.05."""

from __future__ import annotations

import math

import pytest

from harness.launch.slurm.facts import minutes, misfits, parse_sinfo
from harness.launch.slurm.shape import Shape
from tests.launch.cells import make_cell

SINFO = """\
main*|infinite|2|2|4000|(null)
gpu|2-00:00:00|3|64|512000|gpu:h100:8(S:0-1),nvme:1
gpu|2-00:00:00|1|64|512000|gpu:a100:4
down|30:00|0|8|1000|(null)
slurm_load_partitions: something else
"""


def told(tmp_path, *overrides):
    shape = Shape.of(make_cell(tmp_path, "cluster.backend=slurm", *overrides))
    return [str(violation) for violation in misfits(shape, list(parse_sinfo(SINFO)))]


def test_sinfo():
    kinds = {(nodes.partition, nodes.count): nodes for nodes in parse_sinfo(SINFO)}
    assert [nodes.default for nodes in kinds.values()] == [True, False, False, False]
    assert kinds["gpu", 3].gpus == 8
    assert kinds["gpu", 1].gpus == 4
    assert kinds["main", 2].gpus == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [("infinite", math.inf), ("n/a", math.inf), ("30", 30), ("30:00", 30), ("1:30:00", 90), ("2-00:00:00", 2880),
     ("1-12", 2160), ("1-12:30", 2190)],
)  # fmt: skip
def test_limits(text, expected):
    assert minutes(text) == expected


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("cluster.partition=gpus", ("no such partition", "valid: main, gpu, down", "cluster.partition=gpu")),
        ("cluster.partition=gpu cluster.time_min=2881", ("more than partition gpu allows", "cluster.time_min=2880")),
        ("cluster.gpus_per_node=1", ("cluster.gpus_per_node=1", "no node of partition main has more than 0 GPUs")),
        ("cluster.partition=gpu cluster.gpus_per_node=9", ("more than 8 GPUs",)),
        ("cluster.cpus_per_rank=2", ("cluster.cpus_per_rank=2 need 4 processors",)),
        ("cluster.partition=gpu cluster.gres=gpu:h100:9", ("cluster.gres=gpu:h100:9", "more than 8 GPUs")),
        ("cluster.threads_per_rank=2", ("2 ranks a node", "need 4 processors", "more than 2 processors")),
        ("cluster.mem_gb=8", ("cluster.mem_gb=8", "GiB of memory")),
        ("mesh.world_size=3 cluster.nodes=3", ("cluster.nodes=3", "has 2 such nodes", "cluster.nodes=2")),
        ("mesh.world_size=4 cluster.nodes=4 cluster.partition=gpu cluster.gpus_per_node=8", ("has 3 such nodes",)),
    ],
)
def test_what_a_cluster_never_gives_is_refused(tmp_path, overrides, words):
    (violation,) = told(tmp_path, *overrides.split())
    for word in words:
        assert word in violation


@pytest.mark.parametrize(
    "overrides",
    [
        "mesh.world_size=4 cluster.nodes=2",
        "cluster.partition=gpu cluster.gpus_per_node=8 cluster.nodes=2 cluster.time_min=2880",
        "cluster.partition=main,gpu cluster.gpus_per_node=4",
        "cluster.mem_gb=0",
    ],
)
def test_what_it_has_is_not(tmp_path, overrides):
    assert told(tmp_path, *overrides.split()) == []


def test_a_cluster_without_a_default_partition(tmp_path):
    shape = Shape.of(make_cell(tmp_path, "cluster.backend=slurm"))
    (violation,) = misfits(shape, list(parse_sinfo(SINFO.replace("*", ""))))
    assert "cluster.partition=main" in str(violation)
