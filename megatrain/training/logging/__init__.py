"""What a run logs: console, metrics.jsonl, TensorBoard, W&B, status.json."""
