"""Checkpoints: sharded files of canonical tensors, committed atomically, checked on every load, loadable under any layout."""
