"""Nemotron-CC: a crawl, curated in the published order."""
