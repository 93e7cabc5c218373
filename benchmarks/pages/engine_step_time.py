"""Write page and data of a timed study: docs/records/engine_step_time.md, benchmarks/data/engine_step_time.json.

    python run.py -m study=engine_step_time
    python benchmarks/pages/engine_step_time.py

Asked for on a machine that does nothing else, the first command takes three quarters of an hour on two cores, a third
of it for the 16-bit and the hybrid rows; interrupted, it goes on where it stopped. Every run of the study is in the
data, also those that are left out or disturbed, and so are the reasons. Refuses a study whose runs come from different
machines or versions; cells that are missing are named.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.pages import tables
from benchmarks.pages.tables import ROOT
from harness.bench import Report, report, text
from harness.config.errors import BadRequest
from harness.store import provenance
from harness.store.files import write_atomic, write_json
from harness.store.rundir import Store

STUDY = "engine_step_time"


def main(argv: list[str]) -> int:
    """Read the study and write both files; returns the report's exit code, or 2 where there is nothing to show."""
    parser = tables.parser(__doc__)
    parser.add_argument("--root", default="runs", metavar="DIR", help="where runs are stored (default: runs)")
    parser.add_argument("--out", default=str(ROOT), metavar="DIR", help="checkout to write into (default: this one)")
    arguments = parser.parse_args(argv)
    try:
        found = report(arguments.root, STUDY)
    except BadRequest as error:
        print(error, file=sys.stderr)
        return 2
    print(text(found))
    if found.mixed:
        return found.exit_code
    write(found, Path(arguments.out), arguments.root)
    return found.exit_code


def write(found: Report, out: Path, root: str) -> None:
    where = "" if root == "runs" else " launch.root=DIR"  # a machine's own folders are nobody else's
    command = f"python run.py -m study={STUDY}{where} && python benchmarks/pages/{STUDY}.py"
    command += "" if root == "runs" else " --root DIR"
    data, page = out / "benchmarks" / "data" / f"{STUDY}.json", out / "docs" / "records" / f"{STUDY}.md"
    for path in (data, page):
        path.parent.mkdir(parents=True, exist_ok=True)
    study_file = (ROOT / "sweeps" / f"{STUDY}.yaml").read_text(encoding="utf-8")
    write_json(data, {"command": command, "study_file": study_file, **found.as_json()})
    head = f"*Record. {found.question} Made by `{command}`; every number, run by run, in"
    link = f"[{STUDY}.json](../../benchmarks/data/{STUDY}.json).*"
    run = Store(root).find(found.processes[0]["run"])
    facts = provenance.read(run.path)
    versions = ", ".join(f"{name} {version}" for name, version in facts.get("versions", {}).items())
    commit = (facts.get("git") or {}).get("sha")
    machine = f"{facts.get('cpu_model')}, {facts.get('cpu_count')} cores; {versions}; commit {commit}"
    title = "# Step time, memory and traffic of the engines"
    write_atomic(page, f"{title}\n\n{head} {link}\n\n{machine}\n\n```\n{text(found)}\n```\n")
    print(f"\nwritten: {data} and {page}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
