"""`harness.analysis.load` under the name that a checkout's notebooks use."""

from harness.analysis.load import *  # noqa: F403
