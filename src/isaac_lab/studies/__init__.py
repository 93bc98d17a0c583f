"""What is studied, one file each: lists of arms that one loop trains, and what their records say."""
