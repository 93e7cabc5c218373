"""Draw the README's picture and table from a finished study, and write them into docs/ and README.md.

    python run.py -m study=against_fp64
    python benchmarks/pages/readme_figure.py

Writes docs/records/parity.png (how far every arm's loss and gradients lie from the control, and what rounding
explains), docs/records/parity.json (every number in them, the verdicts, versions and sizes), and the table between the
README's markers `<!-- evidence:begin -->` and `<!-- evidence:end -->`. Refuses a study with an unfinished or stale run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.lines import Line2D

from analysis import load, plot, stats
from harness.config.errors import BadRequest
from harness.parity import StudyVerdict, Verdict, loss_bounds, verdict
from harness.store.files import write_atomic, write_json

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- evidence:begin -->", "<!-- evidence:end -->"
POLICIES = ("fp32", "bf16_comm", "bf16")


def main(argv: list[str]) -> int:
    """Draw; returns the exit code: 0, or 2 where the study cannot be shown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="runs", help="where runs are stored (default: runs)")
    parser.add_argument("--study", default="against_fp64", help="a study that was run (default: against_fp64)")
    parser.add_argument("--out", type=Path, default=ROOT, help="repository whose docs/ and README.md are written")
    arguments = parser.parse_args(argv)
    try:
        study = verdict(Path(arguments.root).absolute(), arguments.study)  # as the store names runs
        refuse_unfit(study)
    except BadRequest as error:
        print(error, file=sys.stderr)
        return 2
    runs = load.runs(arguments.root, arguments.study).set_index("path")
    table = rows(study, runs)
    records = arguments.out / "docs" / "records"
    records.mkdir(parents=True, exist_ok=True)
    draw(study, runs, records / "parity.png")
    write_json(records / "parity.json", evidence(study, runs, table))
    insert(arguments.out / "README.md", markdown(study, table))
    print(f"{records / 'parity.png'}, {records / 'parity.json'} and the table in {arguments.out / 'README.md'}")
    return 0


def refuse_unfit(study: StudyVerdict) -> None:
    """Raise `BadRequest` where an arm could not be compared: a picture with holes is none."""
    from harness.config.errors import refuse

    unfit = [arm.sentence for arm in study.arms if arm.tier == "T0"]
    if unfit or not study.arms:
        fix = f"python run.py -m study={study.study} launch.rerun=stale"
        raise refuse(f"study {study.study}", unfit[0] if unfit else "has no arm", fix=fix)


def label(run: pd.Series) -> str:
    """An arm in few words."""
    return f"{run['strategy']}, {run['dtype']}"


def ordered(study: StudyVerdict, runs: pd.DataFrame) -> list[Verdict]:
    """Arms by dtype policy, then by stage."""
    stages = ["no_shard", "optim", "optim_grads", "optim_grads_params"]

    def place(arm: Verdict) -> tuple[int, int]:
        run = runs.loc[arm.arm]
        policy = POLICIES.index(run["dtype"]) if run["dtype"] in POLICIES else len(POLICIES)
        return policy, stages.index(run["strategy"])

    return sorted(study.arms, key=place)


def ordered_policy(name: str) -> int:
    """Place of a dtype policy among those that are drawn."""
    return POLICIES.index(name) if name in POLICIES else len(POLICIES)


def worst_distance(arm: Verdict) -> tuple[float, float]:
    """Largest distance of a gradient at step 1, and what is allowed; NaN where it was not measured."""
    found = (row for row in arm.evidence if row.check == "gradient distance" and row.step == 1)
    row = next(found, None)
    return (float(row.observed), float(row.allowed)) if row else (float("nan"), float("nan"))


def rows(study: StudyVerdict, runs: pd.DataFrame) -> list[dict[str, Any]]:
    """The table's rows: verdict, distance, resolution, and what a step costs."""
    arms = ordered(study, runs)
    costs = stats.costs(load.steps([arm.arm for arm in arms])).set_index("run")
    table = []
    for arm in arms:
        run, (distance, allowed) = runs.loc[arm.arm], worst_distance(arm)
        cost = costs.loc[run["run"]]
        table.append(
            {
                "strategy": run["strategy"],
                "dtype": run["dtype"],
                "verdict": arm.outcome.value,
                "gradient_distance": distance,
                "gradient_allowed": allowed,
                "resolution": arm.resolution,
                "sent_mib_a_step": float(cost["sent_bytes"]) / 2**20,
                "persistent_mib": float(run["accounted_bytes"]) / 2**20,
            }
        )
    return table


def draw(study: StudyVerdict, runs: pd.DataFrame, path: Path) -> None:
    """Two panels: losses against their bound over steps, gradients of step 1 against theirs."""
    arms = ordered(study, runs)
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.6), width_ratios=(1, 1), layout="constrained")
    styles, apart, bounds, first = {}, [], [], {}
    for arm in arms:
        run = runs.loc[arm.arm]
        own = plot.Style(plot.COLOURS[ordered_policy(run["dtype"])], "", label(run))
        styles[run["run"]] = own
        apart.append(stats.against(load.steps([arm.control, arm.arm]), runs.loc[arm.control, "run"]))
        if first.setdefault(run["dtype"], arm.arm) == arm.arm:  # arms of one policy share their bound
            found = [(run["run"], f.step, f.allowed) for f in loss_bounds(arm.arm, arm.control)]
            bounds.append(pd.DataFrame(found, columns=["run", "step", "allowed"]))
    frame = pd.concat(apart)
    plot.differences(frame, left, styles, pd.concat(bounds))
    key = [Line2D([], [], color=plot.COLOURS[ordered_policy(name)], label=name) for name in first]
    zero = bool((frame["difference"] == 0).any())
    plot.legend(left, columns=len(key) + 2, handles=[*key, *plot.difference_key(zero=zero, broken=False)[1:]])
    left.set_title(f"loss against {label(runs.loc[arms[0].control])}; dashed: what rounding explains", fontsize=9)
    distances = pd.concat([load.gradients(arm.arm, arm.control) for arm in arms])
    allowed = {runs.loc[arm.arm, "run"]: worst_distance(arm)[1] for arm in arms}
    plot.gradient_distances(distances, allowed, right, styles)
    right.set_title("every parameter's gradient; the bar is what rounding explains", fontsize=9)
    figure.savefig(path, dpi=130, metadata={"Software": None})
    plt.close(figure)


def evidence(study: StudyVerdict, runs: pd.DataFrame, table: list[dict[str, Any]]) -> dict[str, Any]:
    """Everything shown, with what it was measured on."""
    first = runs.iloc[0]
    return {
        "command": f"python run.py -m study={study.study}"
        f" && python benchmarks/pages/readme_figure.py --study {study.study}",
        "question": study.question,
        "torch": first["torch"],
        "cpu_model": first["cpu_model"],
        "sources": first["sources"],
        "world_size": int(runs["world_size"].max()),
        "steps": int(first["steps"]),
        "global_batch_size": int(first["global_batch_size"]),
        "seq_len": int(first["seq_len"]),
        "arms": table,
        "sentences": [arm.sentence for arm in study.arms],
    }


def markdown(study: StudyVerdict, table: list[dict[str, Any]]) -> str:
    """The README's part: the picture, the table, and how to make both again."""
    columns = (
        "strategy",
        "dtype",
        "verdict",
        "worst gradient",
        "allowed",
        "scale error seen from",
        "sent a step",
        "persistent",
    )
    head = f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n"
    lines = [
        f"| {row['strategy']} | {row['dtype']} | {row['verdict']} | {row['gradient_distance']:.1e} "
        f"| {row['gradient_allowed']:.1e} | {row['resolution']:.1e} | {row['sent_mib_a_step']:.2f} MiB "
        f"| {row['persistent_mib']:.2f} MiB |"
        for row in table
    ]
    command = f"`python run.py -m study={study.study} && python benchmarks/pages/readme_figure.py`"
    parts = (
        "![Every arm's loss and gradients against the control, and what rounding explains](docs/records/parity.png)",
        f"{study.question} Sizes are per rank, distances relative to the control at step 1; "
        "[docs/verdicts.md](docs/verdicts.md) derives the bounds. Step times are left out: these runs were not "
        "interleaved, and two cores cannot rank engines.",
        head + "\n".join(lines),
        f"Made by {command}; all numbers in [docs/records/parity.json](docs/records/parity.json).",
    )
    return "\n\n".join(parts)


def insert(readme: Path, text: str) -> None:
    """Replace what stands between the markers.

    Raises:
        ValueError: the README has no markers.
    """
    whole = readme.read_text(encoding="utf-8") if readme.exists() else f"{BEGIN}\n{END}\n"
    if whole.count(BEGIN) != 1 or whole.count(END) != 1:
        raise ValueError(f"{readme} needs one line {BEGIN} and one line {END}")
    before, after = whole.split(BEGIN)[0], whole.split(END)[1]
    write_atomic(readme, f"{before}{BEGIN}\n{text}\n{END}{after}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
