"""How the equations are made fast: the same results as `equations`, at the lowest cost a device allows."""
