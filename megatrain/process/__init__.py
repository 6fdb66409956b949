"""This process: the signals that stop it, and its standard streams. Importing these modules takes a millisecond."""
