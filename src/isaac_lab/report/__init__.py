"""What people look at after a run: one file per kind of picture or table."""
