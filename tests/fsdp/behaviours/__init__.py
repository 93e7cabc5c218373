"""The behaviours an FSDP engine is known by, one check each, run on our engine and on two others.

A *behaviour* is a sentence with a number (`catalog`), its *check* a function of a `Lab` that builds a *subject* (an
engine behind the least face all of them share), trains it a little and measures. A *mutant* is our engine with one
mistake; its behaviour's check has to fail on it. `benchmarks/pages/behaviours.py` makes docs/records/behaviours.md of
all of it.
"""
