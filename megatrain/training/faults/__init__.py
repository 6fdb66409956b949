"""Response to steps that are not finite or spike: stop, skip, rewind, compute again."""
