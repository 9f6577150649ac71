"""Documents that repeat earlier ones: hashes, MinHash signatures, groups, and the rows that a job leaves out."""
