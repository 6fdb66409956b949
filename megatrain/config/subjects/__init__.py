"""What is derived, refused and noted, a file per subject."""
