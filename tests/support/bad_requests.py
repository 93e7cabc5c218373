"""Requests that are refused, and processes that are asked them.

Each request is a process of its own, started in an empty folder; `torch` is replaced by a package that leaves a mark
and fails when imported.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RUN = [sys.executable, str(ROOT / "run.py")]


@dataclass(frozen=True)
class BadRequest:
    """A command line, and parts its refusal must hold."""

    words: tuple[str, ...]
    told: tuple[str, ...]


TABLE = """
    typo in a group: shardng=optim => shardng; did you mean sharding
    typo in a key: train.stps=5 => train.stps; train.steps
    typo in a key's group: trian.steps=5 => trian.steps; did you mean train.steps
    typo in an option: sharding=optim_grad => sharding=optim_grad; did you mean sharding=optim_grads
    a key without its group: lr=0.1 => did you mean optimizer.lr?
    another project's word: sharding=zero3 => did you mean sharding=optim_grads_params?; no_shard, optim
    typo in an enum: engine.name=natve => engine.name=natve; did you mean engine.name=native?; native, fsdp2, fsdp1
    engine that is not built: engine=horovod => engine=horovod; ddp, deepspeed, ext, fsdp1
    wrong type: train.steps=abc => train.steps=abc; a whole number; Number of optimizer updates
    no value: train.steps= => train.steps=; a whole number
    a fraction for a count: train.steps=1e3 => train.steps=1000.0; a whole number
    null for a number: train.steps=null => train.steps=null; a whole number
    zero steps: train.steps=0 => train.steps=0; 1 to
    negative batch: train.global_batch_size=-8 => train.global_batch_size=-8; 1 to
    learning rate nan: optimizer.lr=nan => optimizer.lr=nan; 0 to
    number beyond 64 bits: train.seed=99999999999999999999 => train.seed=; 0 to 9,223,372,036,854,775,807
    added setting: +new=1 => +new=1; cannot be added
    forced typo: ++train.stps=1 => ++train.stps=1; cannot be added
    removed group: ~engine => ~engine; cannot be removed
    not key=value: native => 'native'; did you mean engine=native?
    a setting as a flag: --sharding=optim => --sharding=optim: is no flag; fix:   sharding=optim
    no such flag: --verbose => --verbose: no such flag; run.py --help
    empty word: '' => is not key=value
    given twice: train.steps=5 train.steps=6 => is given 2 times
    list without -m: sharding=optim,no_shard => run.py -m sharding=optim,no_shard
    unbalanced quote: data=text "data.path=it's" => cannot be read; data.path=
    batch not divisible: train.global_batch_size=10 => train.global_batch_size=10; 8, 16, 24
    heads do not divide: model.num_heads=3 model.num_kv_heads=3 => model.dim=64; multiples of 6
    sequence too long: data.seq_len=4096 => data.seq_len=4096; model.max_seq_len=2048
    engine without that strategy: engine=ddp sharding=optim_grads => sharding.strategy=optim_grads; engine=ddp
    engine without that many ranks: engine=single mesh.world_size=2 => mesh.world_size=2; engine=single
    engine without that promise: engine=ddp numerics=ordered => numerics.mode=ordered; fast, deterministic
    engine without that dtype: engine=ddp dtype.main_grads=fp64 => dtype.main_grads=fp64; engine=native
    hybrid the engine does not run: engine=deepspeed sharding=hsdp mesh=two_by_two => mesh.dp_outer=2; engine=native
    ext without an adapter: engine=ext => engine.adapter=package.module:Class
    main weights that cannot hold: dtype.compute=fp16 dtype.main_params=bf16 => cannot hold; fp16, fp64
    data too short for a batch: data=text data.path={tmp}/short.txt => train.global_batch_size=16
    root not writable: launch.root=/proc/runs => /proc/runs
    no such device: cluster.device=cuda mesh.world_size=64 => cluster.device=cuda; CUDA devices for 64 ranks
    no scheduler: cluster=slurm => sbatch; cluster=local
    two ranks inline: launch.inline=true => launch.inline=true; mesh=one
    study without -m: study=parity_pair => run.py -m study=parity_pair
    unknown study: -m study=parity_par => study=parity_par; did you mean study=parity_pair?
    unknown run: --from 0123abcd => 0123abcd
    two bad cells of a sweep: -m engine=ddp,native sharding=optim_grads => =optim_grads; in 1 of 2 cells
    many at once: train.steps=0 optimizer.lr=-1 data.seq_len=4096 => 3 problems; train.steps=0; lr=-1; 4096
"""
"""Kind, words, and parts of the refusal. `{tmp}` is a folder with bad data; texts of further rules are in
tests/config."""

REQUESTS = {
    kind: BadRequest(tuple(shlex.split(words)), tuple(told.split("; ")))
    for kind, words, told in re.findall(r"^    (.*?): (.*?) => (.*)$", TABLE, re.MULTILINE)
}


@dataclass(frozen=True)
class Outcome:
    """What a refused request did."""

    code: int
    out: str
    err: str
    torch_imported: bool
    left_behind: tuple[str, ...]
    """Files below the folder it was started in."""


def make_bad_data(folder: Path) -> None:
    """Files that each lack something."""
    (folder / "empty.txt").touch()
    (folder / "short.txt").write_text("a" * 300)
    (folder / "ids.bin").write_bytes((60_000).to_bytes(2, "little") * 100_000)
    (folder / "odd.bin").write_bytes(b"abc" * 1001)


def poison_torch(folder: Path) -> None:
    """A package `torch` that leaves a mark where it is imported, and fails."""
    package = folder / "poison" / "torch"
    package.mkdir(parents=True)
    mark = folder / "torch-was-imported"
    (package / "__init__.py").write_text(
        f"open({str(mark)!r}, 'w').close()\nraise ImportError('torch on the front end')\n"
    )


def ask(request: BadRequest, folder: Path) -> Outcome:
    """Make one request in an empty working folder; `folder` holds bad data and the poison."""

    def run(cwd: str) -> tuple[int, str, str]:
        command = [*RUN, *_words(request, folder)]
        done = subprocess.run(command, cwd=cwd, env=_environment(folder), capture_output=True, text=True, timeout=120)
        return done.returncode, done.stdout, done.stderr

    return _observed(run, folder)


class Asker:
    """A process that has imported `run.py`, and forks one for each request: what is asked of it costs no imports."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, "-c", FORKING, str(ROOT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_environment(folder),
            text=True,
        )

    def ask(self, request: BadRequest) -> Outcome:
        """Like `ask`."""

        def run(cwd: str) -> tuple[int, str, str]:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            told = self._folder / "out", self._folder / "err"
            words = _words(request, self._folder)
            self._process.stdin.write(json.dumps([cwd, *map(str, told), words]) + "\n")
            self._process.stdin.flush()
            code = int(self._process.stdout.readline())
            return code, *(each.read_text() for each in told)

        return _observed(run, self._folder)

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


FORKING = """
import json, os, sys, traceback
sys.path.insert(0, sys.argv[1])
import run
for line in sys.stdin:
    folder, out, err, words = json.loads(line)
    child = os.fork()
    if child:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    os.chdir(folder)
    for number, path in enumerate((out, err), start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.argv[:] = [os.path.join(sys.argv[1], "run.py"), *words]
    try:
        code = run.main(words)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code or 0)
"""


def _words(request: BadRequest, folder: Path) -> list[str]:
    return [word.replace("{tmp}", str(folder)) for word in request.words]


def _environment(folder: Path) -> dict[str, str]:
    path = os.pathsep.join(p for p in os.environ["PATH"].split(os.pathsep) if not (Path(p) / "sbatch").exists())
    return os.environ | {"PYTHONPATH": str(folder / "poison"), "PATH": path}


def _observed(run: Callable[[str], tuple[int, str, str]], folder: Path) -> Outcome:
    mark = folder / "torch-was-imported"
    mark.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as cwd:
        code, out, err = run(cwd)
        left = tuple(sorted(str(p.relative_to(cwd)) for p in Path(cwd).rglob("*")))
    return Outcome(code, out, err, mark.exists(), left)
