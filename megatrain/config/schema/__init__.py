"""The settings: one frozen dataclass per section of the configuration."""
