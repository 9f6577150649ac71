"""What every tokenizer is, and what a tokenizer.json says, read without any library."""
