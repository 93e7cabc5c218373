"""The corpus of faults: mistakes that are put into the engine on purpose, so that the power of a verdict is known.

`corpus.py` says what a fault is, `site.py` where it is put. The other files are a part of the step each, with one
function a fault: `python run.py fault.name=tests.faults.sums:F02_doubled_each_microbatch`.
"""
