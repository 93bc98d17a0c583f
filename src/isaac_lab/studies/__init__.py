"""The studies there are: the paper's figures and tables, the race, the recipes, and others, each a list of arms."""
