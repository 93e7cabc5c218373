"""Memory and traffic of a cell before anything runs, for any number of ranks, without them."""
