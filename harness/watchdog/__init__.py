"""Ends a hang of any torch.distributed program by one error on all ranks: `with Watchdog(timeout_s=60): train()`."""

from harness.watchdog.waits import CollectiveError as CollectiveError, by_value as by_value, ranks_text as ranks_text
from harness.watchdog.watchdog import (
    Watchdog as Watchdog,
    abort_group as abort_group,
    default_timeout_s as default_timeout_s,
)
