"""Observations of every step beside the engine; see [Note: Stream of vouching] in `harness.store.vouching`."""
