"""Commands of the nano3 family; `app.py` lists them."""
