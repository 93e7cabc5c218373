"""Recording of any training loop, in five lines; see docs/foreign.md.

It imports torch, numpy and safetensors, and of this package the parts that observe (`harness.probe`) and the format of
a run directory (`harness.store`).
"""

from harness.capture.run import Run as Run, watch as watch
from harness.capture.shards import Part as Part

__all__ = ["Part", "Run", "watch"]
