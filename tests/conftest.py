"""Settings of all tests."""

from __future__ import annotations

import os

from hypothesis import settings

# A submission must not fail over an example nobody has seen: CI takes the same ones every time, people explore.
settings.register_profile("ci", derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")
