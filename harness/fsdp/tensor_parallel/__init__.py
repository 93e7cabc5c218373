"""What a plan of tensor parallelism has left of each parameter on this rank, and how the pieces make a whole."""
