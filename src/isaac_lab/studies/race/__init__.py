"""The race: ISAAC against the optimizers that people would pick instead, by rules that a rival would accept."""
