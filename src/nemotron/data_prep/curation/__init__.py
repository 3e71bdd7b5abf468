"""Curation of documents, a file a step, from crawled pages to text that is worth training on."""
