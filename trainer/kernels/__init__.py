"""Small operations that have several implementations, and the choice between them."""
