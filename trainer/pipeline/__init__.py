"""What each rank does in a step, in order, as data; and its executor."""
