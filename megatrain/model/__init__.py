"""The model: layer specs as data, the parts they name, and the implementations that supply the builder."""
