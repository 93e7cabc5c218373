"""Recording of any training loop, in five lines; see docs/foreign.md.

It imports torch, numpy and safetensors, and of this package the parts that observe (`harness.probe`) and the format of
a run directory (`harness.store`).
"""

from harness.capture.run import Run as Run, watch as watch

__all__ = ["Run", "watch"]
