"""`python -m isaac_lab` is `isaac-newton`."""

from isaac_lab.cli import main

main()
