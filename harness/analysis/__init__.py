"""The store as tables, numbers and pictures; what notebooks and reports narrate over.

    load     runs, steps and what they cost, as tidy tables
    judge    a study's verdicts, their evidence and bounds, as tables
    labels   each run named by what tells it from the others
    stats    numbers from tables
    plot     a table and Axes in, the Axes out

pandas and matplotlib (`pip install '.[analysis]'`) are imported by all but `labels`; torch never.
"""
