"""Files at s3://, gs://, az://, http(s):// and hf://: addresses, listings, reading ahead, and whole files put there."""
