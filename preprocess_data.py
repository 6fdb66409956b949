"""Tokenize JSON Lines, text or Parquet into `.bin` and `.idx` files: `python preprocess_data.py --help`."""

import sys


def main() -> int:
    """Run the command; return its exit code."""
    try:
        from megatrain.process.streams import StandardStreams

        with StandardStreams(ends_program=True):
            from megatrain.data.preprocess.run import main as preprocess

            return preprocess()
    except KeyboardInterrupt:  # while the program is imported
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
