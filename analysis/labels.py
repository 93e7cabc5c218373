"""`harness.analysis.labels` under the name that a checkout's notebooks use."""

from harness.analysis.labels import *  # noqa: F403
