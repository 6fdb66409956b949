"""This process: the signals that stop it, its standard streams, and programs that it starts."""
