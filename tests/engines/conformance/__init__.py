"""What every engine promises, asked of every engine: `python -m pytest --engine NAME`, all of them without it."""
