"""Train a vision-language model: `pretrain.py --model-family vlm` under the name of Megatron-LM's program."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from megatrain.process.exit_deadline import run_program
    from pretrain import main

    run_program(lambda: main(["--model-family", "vlm", *sys.argv[1:]]))
