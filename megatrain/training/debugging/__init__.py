"""Debugging: non-finite values, profiles, loss spikes."""
