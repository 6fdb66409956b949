"""One table a family of models, in a file for each maker."""
