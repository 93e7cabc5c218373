"""`harness.analysis.plot` under another name that a checkout's notebooks use."""

from harness.analysis.plot import *  # noqa: F403
