"""Nemotron, cooked whole: recipes, the stack that runs them on one machine, and the command that starts them."""
