"""Train a language model: `pretrain.py` under the name that Megatron-LM's launch scripts use."""

from __future__ import annotations

from megatrain.process.exit_deadline import run_program
from pretrain import main

if __name__ == "__main__":
    run_program(main)
