"""One table a family of models: a file each."""
