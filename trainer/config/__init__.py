"""The configuration of a run: the sections of one TOML file, read and checked."""
