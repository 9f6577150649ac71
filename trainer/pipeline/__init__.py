"""What a rank does in a step, in order, as data; and the executor of it."""
