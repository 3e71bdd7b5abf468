"""Commands of the nano3 family; `app.py` puts them together."""
