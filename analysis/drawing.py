"""`harness.analysis.drawing` under the name that a checkout's notebooks use."""

from harness.analysis.drawing import *  # noqa: F403
