"""Models of other libraries, in tiny random configurations."""
