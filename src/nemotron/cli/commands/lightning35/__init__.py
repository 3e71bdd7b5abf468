"""Commands of the lightning35 family; one file runs every step."""
