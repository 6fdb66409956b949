"""Logging: console, metrics.jsonl, TensorBoard, W&B, status.json."""
