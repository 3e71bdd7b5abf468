"""Recipes for data of any family."""
