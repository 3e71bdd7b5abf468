"""Commands of the nano2 family; `app.py` puts them together."""
