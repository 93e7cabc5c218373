"""`python -m harness.checkpoint`: what the verbs `export` and `import` run, in a process that may load torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from harness.checkpoint import folder as folders, foreign
from harness.checkpoint.manifest import Damaged
from harness.config.errors import BadRequest
from harness.config.schema import Dtype
from harness.config.typed import load_config
from harness.config.words import setting
from harness.store import commands
from harness.store.errors import StoreError
from harness.store.rundir import RunDir
from harness.store.screen import filtered

REFUSED = (
    BadRequest,
    Damaged,
    foreign.Unfit,
    StoreError,
    CheckpointException,
    SafetensorError,
    UnpicklingError,
)
PICKLE = "warning: DCP's .metadata is a pickle: {}"


def main(argv: Sequence[str]) -> int:
    """Exit code: 0 done, 2 refused."""
    arguments = _parser().parse_args(argv)
    try:
        if arguments.verb == "export":
            print(_export(arguments))
        else:
            print(_import(arguments))
    except FileExistsError as error:
        print(
            f"bad request:\n  {error.filename or arguments.target} is there already; name a folder to be made",
            file=sys.stderr,
        )
        return 2
    except OSError as error:
        message = f"{error.filename}: {error.strerror}" if error.filename else error
        print(f"bad request:\n  {message}", file=sys.stderr)
        return 2
    except REFUSED as error:
        print(error if isinstance(error, BadRequest) else f"refused:\n  {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m harness.checkpoint")
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in ("export", "import"):
        each = verbs.add_parser(verb)
        each.add_argument("source", type=Path)
        each.add_argument("target", type=Path)
        each.add_argument("--format", choices=("hf", "dcp"), required=True)
        each.add_argument("--step", type=int)
        each.add_argument("--dtype", choices=tuple(Dtype.__members__))
        each.add_argument("--shard-mb", type=int, default=foreign.SHARD_BYTES // 1_000_000)
        each.add_argument("--rename", action="append", default=[])
    return parser


def _export(arguments: argparse.Namespace) -> str:
    run = RunDir(arguments.source)
    held = folders.steps(run.ckpt)
    if not held:
        raise foreign.Unfit(f"{run.ckpt} holds no checkpoint: ckpt=none keeps none; train it again with ckpt=last")
    if arguments.step is not None and arguments.step not in held:
        raise foreign.Unfit(f"{run.ckpt} has checkpoints of steps {held}, not {arguments.step}")
    source = folders.path_of(run.ckpt, held[-1] if arguments.step is None else arguments.step)
    try:
        return _exported(run, source, arguments)
    except Damaged as error:
        found = folders.newest_intact(run.ckpt)
        beside = f"--step {int(found.name.removeprefix(folders.PREFIX))}, beside it, is" if found else "no other is"
        raise Damaged(f"{error}; {beside} intact") from error


def _exported(run: RunDir, source: Path, arguments: argparse.Namespace) -> str:
    if arguments.format == "dcp":
        print(PICKLE.format("whoever reads what is written here runs it"), file=sys.stderr)
        keys = foreign.export_dcp(source, arguments.target, foreign.parse_renames(arguments.rename))
        return f"{arguments.target}: {len(keys)} tensors of {source}"
    dtype = None if arguments.dtype is None else getattr(torch, Dtype[arguments.dtype].torch_name)
    index = foreign.export_hugging_face(
        source, arguments.target, load_config(run.config()), dtype, arguments.shard_mb * 1_000_000
    )
    files, total = set(index["weight_map"].values()), index["metadata"]["total_size"]
    number = f"{len(files)} file{'s' * (len(files) > 1)}"
    return f"{arguments.target}: {len(index['weight_map'])} tensors, {total} bytes in {number}, of {source}"


def _import(arguments: argparse.Namespace) -> str:
    if arguments.format == "dcp":
        print(PICKLE.format("reading it runs what it holds; go on only with files you trust"), file=sys.stderr)
        manifest = foreign.import_dcp(arguments.source, arguments.target, foreign.parse_renames(arguments.rename))
    else:
        manifest = foreign.import_hugging_face(arguments.source, arguments.target)
    look = commands.request(f"{setting('ckpt.load', str(arguments.target))} launch.dry_run=true")
    return f"{arguments.target}: {len(manifest.tensors)} tensors, {manifest.bytes} bytes\nnext: {look}"


if __name__ == "__main__":
    with filtered():
        sys.exit(main(sys.argv[1:]))
