"""`harness.analysis.stats` under the name that a checkout's notebooks use."""

from harness.analysis.stats import *  # noqa: F403
