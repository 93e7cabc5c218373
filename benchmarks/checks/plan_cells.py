"""Plans of memory and traffic beside real steps, on cells drawn at random: none of them is one of tests/plan.

    python benchmarks/checks/plan_cells.py            60 cells of seed 1; four minutes on two idle cores
    python benchmarks/checks/plan_cells.py 7 20       seed and number of cells; writes nothing

Writes data/plan_cells.csv. Cells that the product refuses are drawn again. Peaks are those of the rank in the middle,
the least of two starts: on a busy machine ranks part and hold more. Exit code 1: bytes kept or sent are not equal.
"""

from __future__ import annotations

import csv
import random
import statistics
import sys
from pathlib import Path
from typing import Any

from harness.config.errors import BadRequest
from tests.plan.cells import DTYPES, STRATEGIES, Cell
from tests.plan.measured import measure
from tests.plan.test_planned import kept_as_accounted, plan_of, sent_by_kind
from tests.support.spawn import run_ranks

DATA = Path(__file__).resolve().parents[1] / "data" / "plan_cells.csv"
ENGINES = {
    "native": STRATEGIES,
    "fsdp2": STRATEGIES[2:],
    "fsdp1": STRATEGIES[2:],
    "ddp": STRATEGIES[:1],
    "megatron_fsdp": STRATEGIES,
    "deepspeed": STRATEGIES[1:],
}
OF_OURS = (
    *("engine.prefetch=0", "engine.prefetch=4", "engine.offload_optimizer=true", "engine.double_buffer=true"),
    *("numerics=exact", "numerics=ordered", "numerics=deterministic"),
)
OF_ALL = (
    *("model.activation_checkpointing=true", "model.tie_embeddings=true", "model=moe", "model.num_layers=1"),
    *("model.num_layers=6", "optimizer=sgd", "data.seq_len=16", "data.seq_len=128"),
)
WIDTHS = ((48, 50), (72, 130), (96, 256), (160, 171))


def drawn(source: random.Random) -> Cell:
    engine = source.choice(["native"] * 5 + list(ENGINES))
    dtypes = DTYPES if engine == "native" else DTYPES[:3]
    words = [f"engine={engine}", f"sharding={source.choice(ENGINES[engine])}", f"dtype={source.choice(dtypes)}"]
    ranks, tp = source.choice((2, 2, 3, 4)), 1
    if ranks == 4 and engine in ("native", "fsdp2") and source.random() < 0.4:
        tp, words = 2, [*words, f"mesh.sequence_parallel={source.choice(('true', 'false'))}"]
    elif ranks == 4 and engine not in ("ddp", "deepspeed") and source.random() < 0.6:
        words += ["mesh.dp_outer=2"]
        words += [f"sharding.outer={source.choice(('no_shard', 'optim'))}"] if engine == "native" else []
    if source.random() < 0.4:
        dim, ffn_dim = source.choice(WIDTHS[2 * (tp > 1) :])
        words += [f"model.dim={dim}", f"model.ffn_dim={ffn_dim - ffn_dim % tp}"]
    words += source.sample(OF_ALL, source.choice((0, 1, 2))) if tp == 1 else []
    words += source.sample(OF_OURS, source.choice((0, 0, 1))) if engine == "native" else []
    return Cell(ranks, source.choice((1, 2, 3)), tuple(words), tp)


def row_of(cell: Cell) -> dict[str, Any]:
    """A row of the table. BadRequest: the product refuses the cell."""
    made = plan_of(cell)
    starts = [[of_rank for (of_rank,) in run_ranks(measure, cell.ranks, [cell.overrides])] for _ in range(2)]
    first = starts[0][0]
    peak = min(statistics.median(each.peak for each in ranks) for ranks in starts)
    return {
        "cell": str(cell),
        "kept": kept_as_accounted(made) == {role: num_bytes for role, num_bytes in first.kept.items() if num_bytes},
        "sent": "" if made["wire"] is None else sent_by_kind(made) == first.sent,
        "peak": int(peak),
        "off": "" if made["peak"] is None else round(made["peak"]["total"] / peak - 1, 4),
    }


def main() -> None:
    asked = [int(each) for each in sys.argv[1:]]
    seed, count = asked or (1, 60)
    source, rows = random.Random(seed), list[dict[str, Any]]()
    while len(rows) < count:
        try:
            rows.append(row_of(drawn(source)))
        except BadRequest:
            continue
        print(*rows[-1].values(), flush=True)
    off = sorted(abs(row["off"]) for row in rows if row["off"] != "")
    within = sum(each <= 0.05 for each in off)
    print(f"within 5 %: {within} of {len(off)}; median {statistics.median(off):.4f}, largest {off[-1]:.4f}")
    if not asked:
        with DATA.open("w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, rows[0], lineterminator="\n")
            table.writeheader()
            table.writerows(rows)
    sys.exit(any(False in (row["kept"], row["sent"]) for row in rows))


if __name__ == "__main__":
    main()
