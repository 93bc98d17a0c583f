"""Pure functions: the paper's equations, what λ can be, where ḡ comes from, what a convolution's kernel sees."""
