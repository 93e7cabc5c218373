"""Observations of every step beside the engine; see [Note: Stream of step checks] in `harness.store.check_stream`."""
