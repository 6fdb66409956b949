"""Indexed datasets: `<prefix>.bin` and `<prefix>.idx`, read, written and merged."""
