"""The laboratory for sharded data-parallel training."""
