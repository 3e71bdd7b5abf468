"""Recipes that turn raw text into text worth training on."""
