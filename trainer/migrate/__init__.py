"""From runs of Megatron-LM to our configurations: the script is parsed, its arguments are mapped."""
