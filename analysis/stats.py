"""`harness.analysis.judge` under the name that a checkout's notebooks use."""

from harness.analysis.judge import *  # noqa: F403
