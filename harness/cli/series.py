"""Series of other programs as runs: `import-series FILE ...`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from harness.cli.verb import Implementation, path
from harness.config.errors import refuse
from harness.store import commands
from harness.store.identity import slug
from harness.store.screen import counted


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "sources",
        metavar="FILE",
        type=path,
        nargs="+",
        help="of one run each: wandb's offline folder, TensorBoard's, .csv, .tsv, .jsonl, Megatron's golden .json",
    )
    parser.add_argument(
        "--columns",
        metavar="NAME=COLUMN",
        nargs="+",
        required=True,
        help="their name of loss, and if wanted of grad_norm, lr, tokens and step, as loss=train/loss",
    )
    parser.add_argument("--into", metavar="DIR", type=path, default=Path("runs/series"), help="folder of the runs")
    parser.add_argument("--seed", type=int, help="seed of the first; each further one has the next")


def _import(arguments: Namespace) -> int:
    from harness.wandb_sync.series import MEASURES, import_series

    columns = dict(word.split("=", 1) if "=" in word else (word, "") for word in arguments.columns)
    if "loss" not in columns or not all(columns.values()) or not columns.keys() <= {*MEASURES, "step"}:
        choices = "loss=COLUMN, and " + ", ".join(f"{each}=COLUMN" for each in (*MEASURES[1:], "step"))
        raise refuse(f"--columns {' '.join(arguments.columns)}", "must name the column of a loss", choices=choices)
    for place, source in enumerate(arguments.sources):
        target = arguments.into.absolute() / slug(source.name if source.is_dir() else source.stem)
        seed = None if arguments.seed is None else arguments.seed + place
        steps = import_series(source, target, columns, seed)
        print(f"{commands.shown(target)}: {counted(len(steps), 'step')}, {steps[0]} to {steps[-1]}")
    print(f"next: {commands.verb(f'verdict NEW --history {commands.shown(arguments.into)}')}")
    return 0


SERIES = Implementation(_arguments, _import)
