"""Deduplication of document shards: equal texts (exact), nearly equal texts (minhash), repeated passages (substring).

Each way is a few passes of `run_shards`. Tasks turn documents into flat numpy arrays; the driver, or tasks of a later
pass, sort those arrays; the last pass writes the documents that stay. No pass holds texts of more than a batch in
memory, and nothing depends on how documents are divided into shards, on their order, or on the number of workers: what
chooses between two documents is their length and a hash of their ids.
"""
