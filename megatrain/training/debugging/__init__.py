"""Debugging: non-finite values, profiles, replicas that differ."""
