"""A trained model behind HTTP: the interfaces of OpenAI and Megatron-LM, and the ranks that answer."""
