"""Rules of the families of models, a file per kind of samples."""
