"""Conversations to packed rows: read, rendered and masked into a spool, packed by length."""
