"""The command line and YAML: parsing, help texts, and printing a plan."""
