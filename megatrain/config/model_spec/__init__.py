"""The model as data: what a layer consists of, without torch."""
