"""The laboratory: what ISAAC does to training, measured with the public names of `isaac_newton` only."""
