"""Runs of Megatron-LM as configurations of ours: the script is read, its arguments are mapped."""
