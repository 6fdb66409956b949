"""Checkpoints: sharded files of canonical tensors, committed whole, checked on every load, loadable at any layout."""
