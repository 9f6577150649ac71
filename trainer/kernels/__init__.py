"""Small operations that have more than one implementation, and the choice between them."""
