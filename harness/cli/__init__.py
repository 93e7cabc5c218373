"""The command line after `run.py`: `python -m harness VERB`. Every verb ends with what to type next."""
