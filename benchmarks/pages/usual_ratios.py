"""Write harness/parity/telling/usual.json: how much of its bound each check of a verdict takes up in clean pairs.

    python benchmarks/pages/usual_ratios.py    train 20 short runs into runs/usual_ratios, judge all pairs

Pairs have one dtype and one seed; they differ in strategy, engine, or the size of microbatches. Runs are the default
model with two layers, 12 steps on two ranks of the CPU. Exits 1 where a pair is not EQUAL or EQUIVALENT.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

from benchmarks.pages import tables
from harness.parity import Verdict, compare
from harness.parity.telling.render import TABLE

STUDY = "usual_ratios"
CELL = (
    *("train.steps=12", "train.warmup_steps=0", "train.global_batch_size=8", "data.seq_len=32", "model.num_layers=2"),
    *("ckpt=none", f"study.name={STUDY}"),
)
LAYOUTS = (
    ("sharding=no_shard,optim_grads,optim_grads_params", "train.microbatch_size=2"),
    ("sharding=no_shard", "train.microbatch_size=4"),
    ("engine=ddp", "train.microbatch_size=2"),
)
ALIKE = ("dtype.name", "train.seed")


def main() -> int:
    tables.parser(__doc__).parse_args()
    for layout in LAYOUTS:  # runs that are done are left alone
        words = ("-m", *CELL, *layout, "dtype=fp32,bf16", "train.seed=0,1")
        subprocess.run([sys.executable, str(tables.ROOT / "run.py"), *words], cwd=tables.ROOT, check=True)
    verdicts = [*judged(tables.ROOT / "runs" / STUDY)]
    failed = [verdict.sentence for verdict in verdicts if verdict.exit_code]
    if failed:
        print("\n".join(failed))
        return 1
    found: dict[str, float] = {}
    for verdict in verdicts:
        for row in verdict.evidence:
            if not isinstance(row.observed, str):
                found[row.check] = max(found.get(row.check, 0.0), float(f"{row.ratio:.2g}"))
    facts = {"made_by": "python benchmarks/pages/usual_ratios.py", "pairs": len(verdicts), "shares": found}
    TABLE.write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"{TABLE}: {len(found)} checks of {len(verdicts)} pairs")
    return 0


def judged(folder: Path) -> Iterator[Verdict]:
    for one, other in combinations(sorted(path.parent for path in folder.glob("*/summary.json")), 2):
        if _kind(one) == _kind(other):
            yield compare(one, other)


def _kind(run: Path) -> tuple[object, ...]:
    from harness.store.rundir import RunDir, flatten

    config = flatten(RunDir(run).config())
    return tuple(config[key] for key in ALIKE)


if __name__ == "__main__":
    sys.exit(main())
