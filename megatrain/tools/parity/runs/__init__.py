"""Real runs under a layout, compared with one process: rows of the table, and random ones."""
