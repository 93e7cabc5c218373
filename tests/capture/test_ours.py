"""A run of another program against one of this harness: the same model and data, each trained and recorded its way."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness.capture import watch
from harness.config.derived import lr_at
from harness.config.schema import Config
from harness.data.loader import Loader
from harness.engines.protocol import Microbatch, Ranks
from harness.models.workload import workload_for
from harness.parity.compare import compare
from harness.parity.outcome import Outcome, Stage
from harness.parity.record import load
from harness.parity.tiers.comparable import as_stepped
from harness.store.rundir import RunDir
from harness.store.show import diff
from tests.support.composing import compose
from tests.support.mutants import finds
from tests.support.programs import run_program
from tests.support.spawn import run_ranks

RUN = Path(__file__).parents[2] / "run.py"
STEPS, FAULT_AT, AT = 12, 6, "blocks.1.ffn.w_down.weight"
REQUEST = (
    "data=synthetic", "data.seq_len=16", "model.dim=32", "model.ffn_dim=48", "model.num_layers=2",
    "model.vocab_size=64", "data.num_sequences=256", f"train.steps={STEPS}", "train.global_batch_size=8",
    "train.microbatch_size=4", "ckpt=none", "optimizer.clip_norm=0.3",
)  # fmt: skip


def theirs(rank: int, path: Path, clips: bool, fault: bool, seed: int) -> None:
    """Another program: our model under DDP, in a loop of its own."""
    config: Config = compose([*REQUEST]).typed
    config.train.seed = seed
    ranks = Ranks(rank, 2, rank, torch.device("cpu"))
    workload, loader = workload_for(config), Loader(config, rank)
    net = workload.build(ranks.device, torch.float32)
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    with torch.no_grad():
        for name, param in net.named_parameters():
            param.copy_(workload.initial_weight(name, param.shape))
            groups[workload.decays(name, param.shape)].append(param)
    model, chosen = DistributedDataParallel(net), config.optimizer
    decays = [{"params": groups[each], "weight_decay": chosen.weight_decay * each} for each in groups]
    optimizer = torch.optim.AdamW(decays, lr=chosen.lr, betas=tuple(chosen.betas), eps=chosen.eps)
    with watch(model, optimizer, path, share=1.0) as run:
        for step in range(1, STEPS + 1):
            (batch,) = loader.batch(step)
            batch = Microbatch(*(torch.as_tensor(each) for each in batch))
            loss = workload.loss(model, batch)
            loss.backward()
            if fault and step == FAULT_AT:
                for name, param in net.named_parameters():
                    if name == AT:
                        assert param.grad is not None
                        param.grad.mul_(1.5)
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), chosen.clip_norm or 0.0)
            for group in optimizer.param_groups:
                group["lr"] = lr_at(config, step)
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss=loss, data=batch)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ours")
    done = run_program([str(RUN), *REQUEST], cwd=root)
    assert done.returncode == 0, done.stderr + done.stdout
    (path,) = [each.parent for each in (root / "runs").rglob("summary.json")]
    return path


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("theirs") / "study"
    for name, options in {
        "right": (True, False, 0), "unclipped": (False, False, 0), "faulty": (True, True, 0), "seed": (True, False, 1)
    }.items():  # fmt: skip
        run_ranks(partial(theirs, clips=options[0], fault=options[1], seed=options[2]), 2, folder / name)
    return folder


def test_the_same_training_is_equivalent(ours: Path, watched: Path) -> None:
    assert as_stepped(load(ours)).as_recorded is not None, "the request must clip"
    for pair in ((watched / "right", ours), (ours, watched / "right")):
        verdict = compare(*pair)
        assert verdict.outcome is Outcome.EQUIVALENT, verdict.sentence
        assert verdict.admissible.startswith("T2: recorded from outside")
        assert "hashed by two rules" in verdict.sentence
    assert diff(RunDir(watched / "right"), RunDir(ours))


def test_a_fault_is_named_by_step_stage_and_tensor(ours: Path, watched: Path) -> None:
    """Of one step between captured ones nobody saw the local gradients: it is in doubt, not refuted."""
    for name, outcome, step in (("faulty", Outcome.UNDECIDED, FAULT_AT), ("unclipped", Outcome.DIFFERENT, 1)):
        verdict = compare(watched / name, ours)
        first = verdict.findings[0]
        assert (verdict.outcome, first.step) == (outcome, step), verdict.sentence
        assert first.stages == (Stage.reduction, Stage.clipping), "the watch sees gradients when they are clipped"
        assert first.tensor == AT or name == "unclipped", "all tensors are off alike: rounding decides which is named"


def other_weights_are_refused(ours: Path, watched: Path) -> None:
    assert compare(watched / "seed", ours).outcome is Outcome.NOT_COMPARABLE


test_a_mutant_is_found = finds(
    "Watched runs against ours",
    test_the_same_training_is_equivalent="""
        clipping: Our gradients are held unclipped
            parity.tiers.comparable.as_stepped: float(clip) / (norms + 1e-6) => 1.0
        squares of clipped gradients: Captured gradients are clipped twice
            parity.tiers.comparable._times: * factor => * factor**2
    """,
    test_a_fault_is_named_by_step_stage_and_tensor="""
        behind clipping: A loop that clips nothing sums wrongly
            parity.judgement.Judgement._taken: Stage.clipping if => Stage.reduction if
    """,
    other_weights_are_refused="""
        first weights of two rules: Other first weights pass
            parity.tiers.comparable._first_weights: if not np.array_equal(one, other) => if False
    """,
)
