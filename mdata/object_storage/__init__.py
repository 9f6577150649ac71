"""Files at s3://, gs://, az://, http(s):// and hf://: addresses, listings, read-ahead, and uploads."""
