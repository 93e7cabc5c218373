"""slurmdbd over a MariaDB of its own, for a test cluster with accounting; Debian's slurmdbd and mariadb-server."""

from __future__ import annotations

import getpass
import os
import signal
import subprocess
import time
from pathlib import Path

from tests.support.needs import path_of

NEEDED = ("slurmdbd", "sacctmgr", "mariadbd", "mariadb-install-db", "mariadb", "mariadb-admin")

DBD_CONF = """
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
DbdHost=localhost
DbdPort={port}
SlurmUser={user}
LogFile={folder}/slurmdbd.log
PidFile={folder}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={database_port}
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct_db
"""

SLURM_LINES = """
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
AccountingStoragePass={folder}/munge.socket
"""
"""In slurm.conf, in the place of accounting_storage/none."""


def start(folder: Path, port: int, database_port: int, environment: dict[str, str]) -> None:
    """Start both daemons; munged runs already.

    Raises:
        RuntimeError: one does not come up in time.
    """
    data, socket = folder / "database", folder / "mariadb.socket"
    user = getpass.getuser()
    plain = ["--no-defaults", f"--user={user}", f"--datadir={data}"]
    install = [str(path_of("mariadb-install-db")), *plain, "--auth-root-authentication-method=normal", "--skip-test-db"]
    subprocess.run(install, check=True, capture_output=True)
    files = [f"--socket={socket}", f"--pid-file={folder / 'mariadbd.pid'}", f"--log-error={folder / 'mariadbd.log'}"]
    lean = ["--innodb-buffer-pool-size=32M", "--innodb-flush-log-at-trx-commit=0", "--innodb-lock-wait-timeout=900"]
    address = ["--bind-address=127.0.0.1", f"--port={database_port}"]
    subprocess.Popen(
        [str(path_of("mariadbd")), *plain, *files, *address, *lean],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    client = ["--no-defaults", f"--socket={socket}", "-uroot"]
    _until(lambda: _runs([str(path_of("mariadb-admin")), *client, "ping"]), "mariadbd", folder)
    say = "".join(
        f"create user slurm@'{host}' identified by 'slurm'; grant all on slurm_acct_db.* to slurm@'{host}'; "
        for host in ("localhost", "127.0.0.1")
    )
    subprocess.run([str(path_of("mariadb")), *client, "-e", f"create database slurm_acct_db; {say}"], check=True)
    conf = folder / "slurmdbd.conf"
    conf.write_text(DBD_CONF.format(folder=folder, port=port, database_port=database_port, user=user))
    conf.chmod(0o600)
    subprocess.run([str(path_of("slurmdbd"))], env=environment, check=True, capture_output=True)
    add = [str(path_of("sacctmgr")), "--immediate", "--quiet", "add", "cluster", "test"]
    _until(lambda: subprocess.run(add, env=environment, capture_output=True).returncode == 0, "slurmdbd", folder)


def _runs(command: list[str]) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _until(condition: object, what: str, folder: Path, timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    assert callable(condition)
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what} does not come up: {(folder / f'{what}.log').read_text()[-2000:]}")
        time.sleep(0.1)


def stop(folder: Path) -> None:
    """End both, the one that uses the other first."""
    for name in ("slurmdbd", "mariadbd"):
        path = folder / f"{name}.pid"
        if path.exists():
            pid = int(path.read_text())
            os.kill(pid, signal.SIGTERM)
            deadline = time.monotonic() + 20
            while Path(f"/proc/{pid}").exists() and "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text():
                if time.monotonic() > deadline:
                    os.kill(pid, signal.SIGKILL)
                time.sleep(0.05)
