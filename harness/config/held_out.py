"""Batches of an evaluation, by number as `Loader.batch` takes them. Without torch: a rule asks before ranks start."""

from __future__ import annotations

from harness.config.data_source import describe
from harness.config.schema import Config


def held_out_batches(config: Config, num_sequences: int) -> range:
    """Numbers of batches that training never has.

    num_sequences: of the source that they are read from.

    Raises `ValueError`: too few are left, with the fix.
    """
    count, batch, steps = config.measure.validation_batches, config.train.global_batch_size, config.train.steps
    there, separate = num_sequences // batch, config.measure.validation_path is not None
    if there - (0 if separate else steps) >= count:
        return range(1, count + 1) if separate else range(there - count + 1, there + 1)
    of = f"measure.validation_path={config.measure.validation_path}" if separate else describe(config.data)
    used = "" if separate else f", of which train.steps={steps} uses {min(steps, there)}"
    raise ValueError(
        f"{of} has {there} batches of train.global_batch_size={batch}{used}, and measure.validation_batches={count} are"
        " to be held out: fewer of them, fewer steps, more data, or measure.validation_path=FILE"
    )
