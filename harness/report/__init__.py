"""A study on one page: `python -m harness report STUDY`.

contents   what is told: verdicts, tables, failures, provenance; plain values
pictures   its figures (`harness.analysis.figures`), as SVG
page       contents and pictures as one HTML file that needs nothing else
"""
