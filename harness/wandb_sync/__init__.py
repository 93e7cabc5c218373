"""Weights & Biases as a copy of the store: one run there for one signature here, over all attempts.

    sync(runs, mode)                what is stored, whole, with each arm's distance to its control
    push(root, study, mode, page)   a study's verdicts, report and dashboard

A run that trains copies itself (`harness.train.record`). A line is sent as the step it is, so that one that is sent
twice is kept once.
"""
