"""Parts of an engine that `build` makes from a plan: FP8 recipes, and the trial of the parts of a user."""
