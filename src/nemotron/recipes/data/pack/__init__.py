"""Conversations to packed rows."""
