"""Tokenize JSON Lines, text or Parquet into `.bin` and `.idx` files: `python preprocess_data.py --help`."""

import sys

from megatrain.data.preprocess.run import main

if __name__ == "__main__":
    sys.exit(main())
