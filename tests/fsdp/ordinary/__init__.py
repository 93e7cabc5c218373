"""Ordinary programs, drawn at random, under an engine on two ranks against one process in plain torch."""
