"""The configuration of a run: sections of one TOML file, read and checked."""
