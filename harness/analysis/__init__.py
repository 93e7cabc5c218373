"""The store as tables, numbers and pictures.

load: runs and steps as tidy tables. judge: verdicts, evidence and bounds. stats: numbers from
tables. plot: a table and Axes in, the Axes out.

They import pandas and matplotlib (`pip install '.[analysis]'`); torch never.
"""
