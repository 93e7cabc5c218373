"""The checkout's name for `harness.analysis`, beside its notebooks; a wheel installs only the other name."""
