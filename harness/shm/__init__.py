"""Collectives of ranks that share one host, through memory that all of them have mapped.

Each rank of a group has one segment: a memfd, of mode 0600 and of a size that is sealed, gone with the last process
that maps it, also after kill -9. Peers open it once, as `/proc/<pid>/fd/<n>`, when the group is made, which needs the
same user (PTRACE_MODE_READ) and no permission to attach. It has room for all memory of the host, without using any:
pages are reserved (`posix_fallocate`) before a block is handed out, so that no access ends in SIGBUS, and peers never
map again. Where a system forbids any of it, all ranks of the group agree on gloo, and `shared` says why.

    import harness.shm
    harness.shm.register()
    torch.distributed.init_process_group("shm")   # DDP and FSDP2 run over it as over gloo
"""

from harness.shm.group import ShmGroup, register, shared
from harness.shm.segment import memory_observers
from harness.shm.transfer import Work, sum_in_order

__all__ = ["ShmGroup", "Work", "memory_observers", "register", "shared", "sum_in_order"]
