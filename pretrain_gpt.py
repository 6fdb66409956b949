"""Train a language model: `pretrain.py` under the name that Megatron-LM's launch scripts use."""

from __future__ import annotations

import sys

from pretrain import main

if __name__ == "__main__":
    sys.exit(main())
