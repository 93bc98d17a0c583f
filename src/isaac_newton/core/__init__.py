"""The one pipeline: from what a layer received to the conditioned gradient of its weight."""
