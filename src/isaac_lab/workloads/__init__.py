"""What is trained, one file for each kind of network."""
