"""Training runs of any network with any optimizer: what Table 1, Figure 6 and the race are made of."""
