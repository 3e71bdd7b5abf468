"""Commands of the super3 family; `app.py` puts them together."""
