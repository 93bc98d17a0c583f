"""Speed and memory: the paper's Table 2, how the cost scales, and the shapes of other networks."""
