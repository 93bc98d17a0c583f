"""Data that the laboratory trains on: one file per data set."""
