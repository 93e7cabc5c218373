"""Checkpoints in other people's formats: `export RUN DIR` and `import DIR DIR`."""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path

from harness.cli.verb import Implementation
from harness.config.errors import refuse
from harness.config.own import environment
from harness.config.schema import Dtype
from harness.store import checksums
from harness.store.rundir import CONFIG, Store


def _format_argument(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--format",
        choices=("hf", "dcp"),
        required=True,
        help="hf: safetensors in Hugging Face's Llama naming; dcp: torch's distributed checkpoint, whose index is a"
        " pickle",
    )
    parser.add_argument(
        "--rename", action="append", default=[], metavar="OLD=NEW", help="dcp: replace the beginning of keys"
    )


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ArgumentTypeError(f"{text} is no whole number from 1 on")
    return int(text)


def _export_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a path, a prefix of a signature or @last")
    parser.add_argument("target", metavar="DIR", help="a folder to make")
    _format_argument(parser)
    parser.add_argument("--step", type=_count, help="of which checkpoint (default: the newest)")
    parser.add_argument("--dtype", choices=tuple(Dtype.__members__), help="hf: round to it")
    parser.add_argument("--shard-mb", type=_count, help="hf: largest file, in MB of 1,000,000 bytes (default: 5000)")


def _export(arguments: Namespace) -> int:
    run = Store(arguments.root).find(arguments.run)
    checksums.demand(run.path, CONFIG)
    return _convert("export", str(run.path), arguments)


def _import_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("source", metavar="DIR", help="a Hugging Face or DCP folder")
    parser.add_argument("target", metavar="CKPT", help="a folder to make, for ckpt.load")
    _format_argument(parser)


FOUND_BY = {"hf": "*.safetensors", "dcp": ".metadata"}


def _import(arguments: Namespace) -> int:
    source, pattern = Path(arguments.source), FOUND_BY[arguments.format]
    try:
        found = source.is_dir() and any(source.glob(pattern))
    except OSError as error:
        raise refuse(f"import {arguments.source}", f"cannot be looked at: {error.strerror}") from error
    if not found:
        raise refuse(
            f"import {arguments.source}",
            f"has no {pattern}" if source.is_dir() else "is no folder",
            fix="a folder of safetensors files with --format hf, or one that DCP saved with --format dcp",
        )
    if os.path.lexists(arguments.target):
        raise refuse(f"import {arguments.source} {arguments.target}", "would write over it", fix="a name that is free")
    return _convert("import", arguments.source, arguments)


def _convert(verb: str, source: str, arguments: Namespace) -> int:
    words = [verb, source, arguments.target, "--format", arguments.format]
    for name in ("step", "dtype", "shard_mb"):
        if getattr(arguments, name, None) is not None:
            words += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    for each in arguments.rename:
        words += ["--rename", each]
    command = [sys.executable, "-P", "-m", "harness.checkpoint", *words]
    return subprocess.run(command, env=environment(), check=False).returncode


EXPORT = Implementation(_export_arguments, _export)
IMPORT = Implementation(_import_arguments, _import)
